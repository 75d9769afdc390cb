"""Settings of the worker process. Imports no torch, so that `--help` and the supervisor stay quick."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from protocol.settings import CountOrAuto, CountZeroOrAuto, ProcessSettings, Size, SizeOrAuto, UserPath


class WorkerSettings(ProcessSettings):
    """What the model's side needs to know before it starts."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "int4"] = Field(
        "auto",
        description="how weights are held; int4: packed, in groups of 32; auto: on a CPU int4 for files of Q4_1 "
        "where the processor multiplies bfloat16, else float32; on a GPU bfloat16",
    )
    max_model_len: CountOrAuto = Field(None, description="longest prompt plus answer in tokens; auto: the model's")
    kv_memory: SizeOrAuto = Field(
        "auto",
        description="bytes for attention KV and recurrent states, such as 2GiB; "
        "auto: a quarter of what is free and at most 4GiB on a CPU, all that passes leave on a GPU",
    )
    host_memory: Size = Field(0, description="bytes of (pinned) host memory for copies of snapshots; 0: none")
    disk_cache: UserPath | None = Field(
        None, description="directory for copies of snapshots, which outlast the worker; no other worker may use it"
    )
    disk_memory: Size = Field(16 << 30, description="bytes that the files of one model in disk_cache may take")
    foreign_numerics: bool = Field(
        False,
        description="use files that were computed in another way (library versions, processor, threads): such hits are "
        "reported as not exact",
    )
    slots: CountZeroOrAuto = Field(
        None,
        description="snapshots kept at most; 0 turns the cache off; auto: 512 where a snapshot has a recurrent state, "
        "else 2048, for it takes next to nothing beside its KV",
    )
    max_running: int = Field(32, gt=0, description="requests computed at the same time")
    max_waiting: int = Field(256, gt=0, description="requests queued before more are refused with 429")
    queue_seconds: float = Field(
        300.0, gt=0, description="longest wait in the queue; a request whose turn has not come by then gets 429"
    )
    deterministic: bool = Field(True, description="an answer never depends on what runs beside it")
    verify_hits: float = Field(
        0.0, ge=0, le=1, description="share of hits to compute again in idle time and compare bit for bit"
    )
    check_invariants: bool = Field(
        False, description="check the slot table, index and pools after every step too, not only at rest; slow"
    )
    threads: CountOrAuto = Field(None, description="CPU threads of the model; auto: one a physical core")

    @field_validator("max_model_len")
    @classmethod
    def _room_for_an_answer(cls, value: int | None) -> int | None:
        if value == 1:
            raise ValueError("a prompt and its answer need a token each, so at least 2")
        return value
