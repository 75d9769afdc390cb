"""HTTP dialects, chat templates, tokenization and boundaries. Holds no cache state; never imports torch."""
