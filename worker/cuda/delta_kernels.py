"""The gated delta rule in Triton: of whole chunks for prefill, one token a sequence for decode.

A chunk is at most `CHUNK` rows. Where chunks begin is the caller's plan (`chunk_plan.py`), the same for every way a
prompt is cut into passes, and each chunk is computed by the same operations whichever others come with it: so
neither shows in a bit. The state between chunks is float32, as it is stored. Within a chunk the rule is solved in its
matrix form (Yang et al., 2024): with A[i, j] = beta_i * decay(j..i) * (k_i . k_j) below the diagonal and
T = (1 + A)^-1, the changes are T @ (beta * v) minus what T @ (beta * decay * k) reads of the state before the chunk.

A row of `mixed` is [convolution inputs | gate of the output | what makes decay | what makes beta]. A state entry has,
at `layer` floats from its start, the convolution's last inputs [taps - 1, channels], then [heads, K, V].
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

CHUNK = 64
_CHUNK = tl.constexpr(CHUNK)
_LINEAR_FROM = tl.constexpr(20.0)  # softplus is its argument from here on, to float32


@triton.jit
def _softplus(x):
    return tl.where(x > _LINEAR_FROM, x, tl.log(1.0 + tl.exp(tl.minimum(x, _LINEAR_FROM))))


@triton.jit
def _entry(memory, entry, stride, layer):
    """Where a layer's part of an entry begins."""
    return memory + tl.cast(entry, tl.int64) * stride + layer


@triton.jit
def convolve_kernel(
    mixed_ptr, conv_ptr, memory, plan, out_ptr, rows, mixed_stride, entry_stride, layer, eps, scale,
    TAPS: tl.constexpr, K_HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Causal convolution and silu; queries and keys to unit length, queries times `scale`; program (tile, head).

    Heads of `DIM` channels: queries, then keys, then values. `out` [rows, channels].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    channel = head * DIM + tl.arange(0, DIM)
    tail = _entry(memory, tl.load(plan + 1), entry_stride, layer)
    total = tl.zeros((ROWS, DIM), tl.float32)
    for tap in tl.static_range(TAPS):
        source = row - (TAPS - 1) + tap
        at = source.to(tl.int64)[:, None] * mixed_stride + channel[None, :]
        x = tl.load(mixed_ptr + at, mask=((source >= 0) & (row < rows))[:, None], other=0.0).to(tl.float32)
        before = (source + TAPS - 1)[:, None] * CHANNELS + channel[None, :]
        x += tl.load(tail + before, mask=(source < 0)[:, None], other=0.0)
        total += x * tl.load(conv_ptr + tap * CHANNELS + channel)[None, :]
    x = total * tl.sigmoid(total)
    if head < 2 * K_HEADS:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
        if head < K_HEADS:
            x = x * scale
    to = row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out_ptr + to, x.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["saves"])
def keep_tails_kernel(
    mixed_ptr, memory, plan, saves, mixed_stride, entry_stride, layer,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution's last inputs, to every entry that the pass leaves a state in; program: some channels.

    `saves` is where the plan lists them: after how many rows, and the entry; the sequence's own comes last. What is
    kept of an early one are inputs from before the pass.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    first = _entry(memory, tl.load(plan + 1), entry_stride, layer)
    for save in range(0, tl.load(plan + 3)):
        row = tl.load(plan + saves + 2 * save)
        target = _entry(memory, tl.load(plan + saves + 2 * save + 1), entry_stride, layer)
        for tap in tl.static_range(TAPS - 1):
            # Rising: where an entry is both read and written, what is read lies past what was written.
            source = row - (TAPS - 1) + tap
            at = tl.cast(source, tl.int64) * mixed_stride + channel
            x = tl.load(mixed_ptr + at, mask=inside & (source >= 0), other=0.0).to(tl.float32)
            before = (source + TAPS - 1) * CHANNELS + channel
            x += tl.load(first + before, mask=inside & (source < 0), other=0.0)
            tl.store(target + tap * CHANNELS + channel, x, mask=inside)


@triton.jit
def solve_kernel(
    mixed_ptr, qkv_ptr, decay_ptr, bias_ptr, plan, change_ptr, read_ptr, sums_ptr, mixed_stride, gates_at,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk's rows do to the state, apart from the state before it; program (chunk, head).

    `change` [rows, heads, V] = T @ (beta * v), `read` [rows, heads, K] = T @ (beta * decay * k), and `sums`
    [rows, heads]: the logarithm of the decay from the chunk's start through each row.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    if chunk >= tl.load(plan):
        return
    first = tl.load(plan + 4 + chunk)
    count = tl.load(plan + 5 + chunk) - first
    i = tl.arange(0, _CHUNK)
    real = i < count
    row = (first + i).to(tl.int64)
    at = mixed_ptr + row * mixed_stride + gates_at + head
    slow = tl.load(at, mask=real, other=0.0).to(tl.float32) + tl.load(bias_ptr + head)
    log_decay = tl.where(real, tl.load(decay_ptr + head) * _softplus(slow), 0.0)
    beta = tl.where(real, tl.sigmoid(tl.load(at + HEADS, mask=real, other=0.0).to(tl.float32)), 0.0)
    sums = tl.cumsum(log_decay, 0)
    tl.store(sums_ptr + row * HEADS + head, sums, mask=real)

    key_head = head // (HEADS // K_HEADS)
    in_k = tl.arange(0, K)
    k_at = qkv_ptr + row[:, None] * CHANNELS + (K_HEADS + key_head) * K + in_k[None, :]
    k = tl.load(k_at, mask=real[:, None], other=0.0)
    below = i[:, None] > i[None, :]
    decayed = tl.exp(tl.where(below, sums[:, None] - sums[None, :], 0.0))
    a = tl.where(below, tl.dot(k, tl.trans(k)) * decayed * beta[:, None], 0.0)

    # The inverse of 1 + A from its diagonal outwards: of blocks twice the size, the lower left corner is
    # -T @ A @ T, of what is known.
    solved = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    solved -= tl.where(i[:, None] // 2 == i[None, :] // 2, a, 0.0)
    for power in tl.static_range(1, 6):
        same = i[:, None] >> (power + 1) == i[None, :] >> (power + 1)
        corner = tl.where(same & (i[:, None] >> power != i[None, :] >> power), a, 0.0)
        inner = tl.dot(corner, solved, input_precision=PRECISION)
        solved -= tl.dot(solved, inner, input_precision=PRECISION)

    weighted = solved * beta[None, :]
    in_v = tl.arange(0, V)
    v_at = qkv_ptr + row[:, None] * CHANNELS + 2 * K_HEADS * K + head * V + in_v[None, :]
    v = tl.load(v_at, mask=real[:, None], other=0.0)
    change = tl.dot(weighted.to(v.dtype), v)
    to = (row * HEADS + head)[:, None]
    tl.store(change_ptr + to * V + in_v[None, :], change.to(v.dtype), mask=real[:, None])
    read = tl.dot((weighted * tl.exp(sums)[None, :]).to(k.dtype), k)
    tl.store(read_ptr + to * K + in_k[None, :], read.to(k.dtype), mask=real[:, None])


@triton.jit(do_not_specialize=["targets"])
def carry_kernel(
    qkv_ptr, change_ptr, read_ptr, sums_ptr, plan, targets, states_ptr, memory, entry_stride, layer,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The state from chunk to chunk; program (`COLUMNS` values, head).

    Leaves the state before each chunk in `states` [chunks, heads, K, V], in 16 bits, for `attend_kernel`; takes from
    `change` what the state predicted already; and keeps the state in float32 after the chunks that have a target.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    in_k = tl.arange(0, K)
    i = tl.arange(0, _CHUNK)
    key_head = head // (HEADS // K_HEADS)
    in_state = head * K * V + in_k[:, None] * V + columns[None, :]
    state = tl.load(_entry(memory, tl.load(plan + 1), entry_stride, layer) + in_state)
    chunks = tl.load(plan)
    for chunk in range(0, chunks):
        first = tl.load(plan + 4 + chunk)
        count = tl.load(plan + 5 + chunk) - first
        target = tl.load(plan + targets + chunk)
        row = (first + i).to(tl.int64)
        real = (i < count)[:, None]
        at = (row * HEADS + head)[:, None]
        narrow = state.to(states_ptr.dtype.element_ty)
        to = (tl.cast(chunk, tl.int64) * HEADS + head) * K * V
        tl.store(states_ptr + to + in_k[:, None] * V + columns[None, :], narrow)
        read = tl.load(read_ptr + at * K + in_k[None, :], mask=real, other=0.0)
        change_at = change_ptr + at * V + columns[None, :]
        change = tl.load(change_at, mask=real, other=0.0).to(tl.float32) - tl.dot(read, narrow)
        tl.store(change_at, change.to(read.dtype), mask=real)
        sums = tl.load(sums_ptr + row * HEADS + head, mask=i < count, other=0.0)
        whole = tl.load(sums_ptr + (first + count - 1).to(tl.int64) * HEADS + head)
        left = tl.where(i < count, tl.exp(whole - sums), 0.0)
        k_at = qkv_ptr + row[None, :] * CHANNELS + (K_HEADS + key_head) * K + in_k[:, None]
        k = tl.load(k_at, mask=(i < count)[None, :], other=0.0)
        state = tl.dot(k, (change * left[:, None]).to(k.dtype), state * tl.exp(whole))
        if target >= 0:
            tl.store(_entry(memory, target, entry_stride, layer) + in_state, state)
    tl.store(_entry(memory, tl.load(plan + 2), entry_stride, layer) + in_state, state)


@triton.jit
def attend_kernel(
    mixed_ptr, qkv_ptr, change_ptr, sums_ptr, states_ptr, plan, norm_ptr, out_ptr, mixed_stride, gate_at, eps,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The rows' outputs, normed and gated; program (chunk, head). `out` [rows, heads, V]."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    if chunk >= tl.load(plan):
        return
    first = tl.load(plan + 4 + chunk)
    count = tl.load(plan + 5 + chunk) - first
    i = tl.arange(0, _CHUNK)
    real = (i < count)[:, None]
    row = (first + i).to(tl.int64)
    in_k = tl.arange(0, K)
    in_v = tl.arange(0, V)
    key_head = head // (HEADS // K_HEADS)
    q_at = qkv_ptr + row[:, None] * CHANNELS + key_head * K + in_k[None, :]
    q = tl.load(q_at, mask=real, other=0.0)
    k = tl.load(q_at + K_HEADS * K, mask=real, other=0.0)
    sums = tl.load(sums_ptr + row * HEADS + head, mask=i < count, other=0.0)
    seen = (i[:, None] >= i[None, :]) & real
    decayed = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0))
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * decayed, 0.0)
    at_state = (tl.cast(chunk, tl.int64) * HEADS + head) * K * V
    state = tl.load(states_ptr + at_state + in_k[:, None] * V + in_v[None, :])
    out = tl.dot(q, state) * tl.exp(sums)[:, None]
    to = (row * HEADS + head)[:, None] * V + in_v[None, :]
    change = tl.load(change_ptr + to, mask=real, other=0.0)
    out = tl.dot(scores.to(change.dtype), change, out)
    gate_from = mixed_ptr + row[:, None] * mixed_stride + gate_at + head * V + in_v[None, :]
    gate = tl.load(gate_from, mask=real, other=0.0).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, 1) / V + eps)[:, None] * tl.load(norm_ptr + in_v)[None, :]
    tl.store(out_ptr + to, (out * gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def convolve_step_kernel(
    mixed_ptr, conv_ptr, memory, entries, positions, out_ptr, mixed_stride, entry_stride, layer, eps, scale,
    TAPS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, CHANNELS: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The convolution at one new row a sequence, which joins the last inputs; program (sequence, some heads).

    Heads of `K` channels, as in `convolve_kernel`; `out` float32 [rows, channels]. A sequence at -1 is padding.
    """
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    if tl.load(positions + row) < 0:
        return
    head = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)
    channel = head[:, None] * K + tl.arange(0, K)[None, :]
    inside = channel < CHANNELS
    tail = _entry(memory, tl.load(entries + row), entry_stride, layer)
    total = tl.zeros((HEADS_AT_ONCE, K), tl.float32)
    for tap in tl.static_range(TAPS - 1):
        x = tl.load(tail + tap * CHANNELS + channel, mask=inside, other=0.0)
        total += x * tl.load(conv_ptr + tap * CHANNELS + channel, mask=inside, other=0.0)
        if tap > 0:
            tl.store(tail + (tap - 1) * CHANNELS + channel, x, mask=inside)
    own = mixed_ptr + tl.cast(row, tl.int64) * mixed_stride + channel
    x = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    total += x * tl.load(conv_ptr + (TAPS - 1) * CHANNELS + channel, mask=inside, other=0.0)
    tl.store(tail + (TAPS - 2) * CHANNELS + channel, x, mask=inside)
    y = total * tl.sigmoid(total)
    unit = y * tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    unit = unit * tl.where(head < K_HEADS, scale, 1.0)[:, None]
    y = tl.where((head < 2 * K_HEADS)[:, None], unit, y)
    tl.store(out_ptr + tl.cast(row, tl.int64) * CHANNELS + channel, y, mask=inside)


@triton.jit
def step_kernel(
    mixed_ptr, qkv_ptr, decay_ptr, bias_ptr, norm_ptr, memory, entries, positions, out_ptr,
    mixed_stride, gate_at, gates_at, entry_stride, layer, eps,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token a sequence: the state moves on in place, the output comes normed and gated; program (row, head)."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(positions + row) < 0:
        return
    in_k = tl.arange(0, K)
    in_v = tl.arange(0, V)
    at = _entry(memory, tl.load(entries + row), entry_stride, layer) + head * K * V
    state_at = at + in_k[:, None] * V + in_v[None, :]
    state = tl.load(state_at)
    own = mixed_ptr + tl.cast(row, tl.int64) * mixed_stride
    slow = tl.load(own + gates_at + head).to(tl.float32) + tl.load(bias_ptr + head)
    beta = tl.sigmoid(tl.load(own + gates_at + HEADS + head).to(tl.float32))
    key_head = head // (HEADS // K_HEADS)
    of_row = qkv_ptr + tl.cast(row, tl.int64) * CHANNELS
    q = tl.load(of_row + key_head * K + in_k)
    k = tl.load(of_row + (K_HEADS + key_head) * K + in_k)
    v = tl.load(of_row + 2 * K_HEADS * K + head * V + in_v)
    state = state * tl.exp(tl.load(decay_ptr + head) * _softplus(slow))
    change = (v - tl.sum(k[:, None] * state, 0)) * beta
    state = state + k[:, None] * change[None, :]
    tl.store(state_at, state)
    out = tl.sum(q[:, None] * state, 0)
    gate = tl.load(own + gate_at + head * V + in_v).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, 0) / V + eps) * tl.load(norm_ptr + in_v)
    to = out_ptr + (tl.cast(row, tl.int64) * HEADS + head) * V + in_v
    tl.store(to, (out * gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty))
