"""Sizes that both ends of a socket check, in bytes unless the name says otherwise."""

MAX_BODY_BYTES = 64 << 20  # an HTTP request
MAX_HEADER_BYTES = 16 << 20  # the orjson header of one message
MAX_PROMPT_TOKENS = 16 << 20
MAX_FRAMES = 4
MAX_FRAME_BYTES = 4 * MAX_PROMPT_TOKENS  # more than that ends a connection before it is held in memory
MAX_GRAMMAR_CHARACTERS = 1 << 20  # of `Sampling.grammar`
MAX_REQUEST_ID_CHARACTERS = 256
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less its terminating zero
