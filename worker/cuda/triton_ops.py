"""`Ops` by the kernels of this folder. Needs Triton, and tensors of 16 bits on a CUDA device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.cuda import attention_kernels, product_kernels, row_kernels
from worker.cuda.hopper_attention import ROWS, HopperAttention, try_hopper
from worker.cuda.ops import PaddedRows, Places, needed_rows, padded_product, split_count
from worker.cuda.tiles import DECODE_SPLIT, PREFILL_SPLIT, Tile, Tiles
from worker.heads import HeadNorms

_HEADS_AT_ONCE = 16  # of a row, in one program of `turn_and_store_kernel`
_NARROW = 128  # head sizes up to here fit four warps
_GATE_PIECE = 2048
_MERGE_HEADS = 8
_MERGE_STEP = 16
_LOG2_E = math.log2(math.e)


class TritonOps:
    """The kernels at the shapes of `tiles`. The splits are parameters for tests alone: bits depend on them."""

    def __init__(
        self,
        tiles: Tiles,
        prefill_split: int = PREFILL_SPLIT,
        decode_split: int = DECODE_SPLIT,
        padded: PaddedRows | None = None,
    ) -> None:
        # Sums of a product split in depth stay in float32: never less exact because there are few rows.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.padded: PaddedRows = padded or {}
        self._tiles = tiles
        self._prefill_split = prefill_split
        self._decode_split = decode_split
        self._hoppers: dict[int, HopperAttention | None] = {}  # by head size, once there was one

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, y, weight, eps)

    def _norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        rows, size = x.shape
        out = torch.empty_like(x)
        width = _power(size)
        row_kernels.norm_kernel[(rows,)](
            x,
            x if y is None else y,
            weight,
            out,
            size,
            eps,
            y is not None,
            width,
            self._tiles.early,
            num_warps=8 if width > 2048 else 4,
            launch_pdl=self._tiles.early,
        )
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        return self._gate_into(gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2), gate_up)

    def gated_product(self, gate_up: Tensor, weight: Tensor) -> Tensor:
        # Where the product wants more rows they are there from the start: joining them afterwards is a copy.
        rows = needed_rows(len(gate_up), weight, self.padded)
        inner = self._gate_into(gate_up.new_empty(rows, gate_up.shape[1] // 2), gate_up)
        return F.linear(inner, weight)[: len(gate_up)]

    def _gate_into(self, out: Tensor, gate_up: Tensor) -> Tensor:
        size = out.shape[1]
        grid = len(gate_up), -(-size // _GATE_PIECE)
        early = self._tiles.early
        row_kernels.gate_kernel[grid](gate_up, out, size, _GATE_PIECE, early, num_warps=4, launch_pdl=early)
        return out

    def copy_block(self, memory: Tensor, source: int, target: int) -> None:
        self._copy_block(memory, memory, source, target)

    def copy_named_block(self, memory: Tensor, pair: Tensor) -> None:
        self._copy_block(memory, pair, 0, 0, named=True)

    def _copy_block(self, memory: Tensor, pair: Tensor, source: int, target: int, named: bool = False) -> None:
        parts, size = math.prod(memory.shape[:3]), memory.shape[4] * memory.shape[5]
        row_kernels.copy_block_kernel[(parts,)](
            memory, pair, source, target, memory.stride(2), size, _power(size), named, num_warps=4
        )

    def turn_and_store(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: HeadNorms | None,
        places: Places,
        pool: Tensor,
        *,
        stores: bool = True,
        norm_values: bool = False,
    ) -> Tensor:
        _, kv_heads, _, block, dim = pool.shape
        kv_heads = kv_heads if stores else 0
        rows, heads = len(places.positions), qkv.shape[1] // dim - 2 * kv_heads
        q = qkv.new_empty(len(qkv), heads * dim)
        q_norm, k_norm, eps = (qkv, qkv, 0.0) if norms is None else norms
        row_kernels.turn_and_store_kernel[(rows, -(-(heads + 2 * kv_heads) // _HEADS_AT_ONCE))](
            qkv,
            qkv if bias is None else bias,
            q_norm,
            k_norm,
            places.cos,
            places.sin,
            places.positions,
            places.tables,
            q,
            pool[0],
            pool[1],
            qkv.stride(0),
            _table_stride(places),
            pool.stride(1),
            eps,
            heads,
            kv_heads,
            dim,
            block,
            _HEADS_AT_ONCE,
            bias is not None,
            norms is not None,
            norm_values,
            self._tiles.early,
            num_warps=4 if dim <= _NARROW else 8,
            launch_pdl=self._tiles.early,
        )
        return q

    def attend_prefill(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        return self._attend_prefill(q, places, pool, longest, self._hopper_for(pool, window), window)

    def _hopper_for(self, pool: Tensor, window: int | None) -> HopperAttention | None:
        """What computes attention over this pool in place of our other kernel, tried when it is first needed."""
        if not self._tiles.hopper or not HopperAttention.serves(pool, window):
            return None
        dim = pool.shape[4]
        if dim not in self._hoppers:
            self._hoppers[dim] = try_hopper(self._attend_prefill, pool.device, dim)
        return self._hoppers[dim]

    def _attend_prefill(
        self,
        q: Tensor,
        places: Places,
        pool: Tensor,
        longest: int,
        hopper: HopperAttention | None,
        window: int | None = None,
    ) -> Tensor:
        _, kv_heads, _, block, dim = pool.shape
        rows, heads = len(places.positions), q.shape[1] // dim
        group, tile, split = heads // kv_heads, self._tiles.prefill_for(dim), self._prefill_split
        out = torch.empty_like(q)
        tiles = -(-rows * group // (tile.rows if hopper is None else ROWS))
        splits = split_count(longest, split)
        # Few rows: one program a split, unless windows are few keys. Either way has the same bits.
        apart = splits > 1 and tiles * kv_heads < 2 * self._tiles.processors and window is None
        parts = q.new_empty(splits if apart else int(splits > 1), rows, heads, dim, dtype=torch.float32)
        sums = q.new_empty(splits if apart else 0, 2, rows, heads, dtype=torch.float32)
        grid, each = (tiles, kv_heads, splits if apart else 1), 1 if apart else splits
        if hopper is not None:
            hopper.launch(q, places, pool, out, parts, sums, grid, each, split)
        else:
            attention_kernels.prefill_kernel[grid](
                q,
                pool[0],
                pool[1],
                places.tables,
                places.span,
                out,
                parts,
                sums,
                rows,
                each,
                pool.stride(1),
                _LOG2_E / math.sqrt(dim),
                heads,
                group,
                dim,
                block,
                split,
                tile.rows,
                tile.columns,
                window or 0,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
        if apart:
            attention_kernels.merge_kernel[(rows, -(-heads // _MERGE_HEADS))](
                parts,
                sums,
                places.span,
                out,
                rows,
                heads,
                dim,
                split,
                _MERGE_HEADS,
                window or 0,
                self._tiles.early,
                num_warps=4,
                launch_pdl=self._tiles.early,
            )
        return out

    def attend_decode(
        self, q: Tensor, places: Places, pool: Tensor, longest: int, window: int | None = None
    ) -> Tensor:
        _, kv_heads, _, block, dim = pool.shape
        rows, heads = len(places.positions), q.shape[1] // dim
        group, tile, split = heads // kv_heads, self._tiles.decode_for(dim), self._decode_split
        splits = split_count(longest, split)
        parts = q.new_empty(rows, splits, heads, dim, dtype=torch.float32)
        sums = q.new_empty(rows, splits, 2, heads, dtype=torch.float32)
        out = torch.empty_like(q)
        attention_kernels.decode_kernel[(rows, kv_heads, splits)](
            q,
            pool[0],
            pool[1],
            places.tables,
            places.positions,
            parts,
            sums,
            _table_stride(places),
            pool.stride(1),
            _LOG2_E / math.sqrt(dim),
            heads,
            group,
            dim,
            block,
            split,
            max(tile.rows, _power(group)),
            tile.columns,
            window or 0,
            self._tiles.early,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=self._tiles.early,
        )
        attention_kernels.decode_merge_kernel[(rows, heads)](
            parts,
            sums,
            places.positions,
            out,
            splits,
            heads,
            dim,
            split,
            _MERGE_STEP,
            window or 0,
            self._tiles.early,
            num_warps=4,
            launch_pdl=self._tiles.early,
        )
        return out

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return padded_product(x, weight, self.padded)

    def skinny(
        self, x: Tensor, weight: Tensor, plus: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        out = x.new_empty(len(x), len(weight), dtype=dtype or x.dtype)
        self._skinny(x, weight, plus, out, gated=False)
        return out

    def skinny_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(weight) // 2)
        self._skinny(x, weight, None, out, gated=True)
        return out

    def _skinny(self, x: Tensor, weight: Tensor, plus: Tensor | None, out: Tensor, gated: bool) -> None:
        (rows, inputs), outputs = x.shape, out.shape[1]
        tile = _tile_for(rows, self._tiles.skinny_gated if gated else self._tiles.skinny)
        even = not (outputs % tile.columns or inputs % tile.depth)
        product_kernels.skinny_kernel[(-(-outputs // tile.columns),)](
            x,
            weight,
            out if plus is None else plus,
            out,
            rows,
            outputs,
            inputs,
            tile.rows,
            tile.columns,
            tile.depth,
            even,
            gated,
            plus is not None,
            self._tiles.early,
            min(self._tiles.ahead, inputs & -inputs),
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=self._tiles.early,
        )


def _table_stride(places: Places) -> int:
    return places.tables.stride(0) if len(places.tables) > 1 else 0


def _tile_for(rows: int, tiles: dict[int, Tile]) -> Tile:
    return tiles[min(count for count in tiles if count >= rows)]


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
