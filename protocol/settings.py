"""Settings of a process: defaults < TOML file < `PREFIXD_*` environment < flags.

One flat TOML file and one environment serve all processes, so a process accepts keys that belong to another
one and refuses those that belong to none. Which exist is known from the entry points `prefixd.settings`.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from protocol.endpoints import Endpoint, check_tcp, control_endpoint, work_endpoint
from protocol.errors import SettingsError
from protocol.rundir import default_run_dir
from protocol.sizes import format_size, parse_size

ENV_PREFIX = "PREFIXD_"
CONFIG_VARIABLE = "PREFIXD_CONFIG"
EXIT_USAGE = 2


def _none_if_auto(value: object) -> object:
    return None if value == "auto" else value


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _auto_or_size(value: object) -> object:
    return value if value == "auto" else parse_size(value)


_SIZE = BeforeValidator(parse_size)
_AUTO_IS_NONE = BeforeValidator(_none_if_auto)

Size = Annotated[int, _SIZE, Field(ge=0)]
SizeOrAuto = Annotated[Literal["auto"] | Annotated[int, Field(gt=0)], BeforeValidator(_auto_or_size)]
CountOrAuto = Annotated[Annotated[int, Field(gt=0)] | None, _AUTO_IS_NONE]  # None, written `auto`: our choice
CountZeroOrAuto = Annotated[Annotated[int, Field(ge=0)] | None, _AUTO_IS_NONE]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]
UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
TcpEndpoint = Annotated[str, AfterValidator(check_tcp)]


class ProcessSettings(BaseModel):
    """Base of each process's settings, with those that all processes have. Constructing one reads nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="model to serve: the embedded one by name, a .gguf file or a directory with safetensors",
    )
    run_dir: UserPath = Field(
        default_factory=default_run_dir, description="directory of the sockets; one daemon holds it"
    )
    curve_key: UserPath | None = Field(
        None, description="file of CURVE keys (see `prefixd keygen`), for what goes over TCP"
    )
    worker_endpoint: TcpEndpoint | None = Field(
        None,
        description="tcp://HOST:PORT of the worker for gateways on other machines, instead of the run directory",
    )
    control_endpoint: TcpEndpoint | None = Field(
        None, description="tcp://HOST:PORT at which the worker takes commands, instead of the run directory"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")

    @field_validator("worker_endpoint", "control_endpoint")
    @classmethod
    def _with_keys(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("curve_key") is None:
            raise ValueError("goes over TCP and needs curve_key")
        return value

    @property
    def work_at(self) -> Endpoint:
        """Raises `SettingsError`."""
        return work_endpoint(self.run_dir, self.worker_endpoint, self.curve_key)

    @property
    def control_at(self) -> Endpoint:
        """Raises `SettingsError`."""
        return control_endpoint(self.run_dir, self.control_endpoint, self.curve_key)


AnySettings = TypeVar("AnySettings", bound=ProcessSettings)


@cache
def process_settings() -> dict[str, type[ProcessSettings]]:
    """The settings class of every process, by the process's name."""
    return {entry.name: entry.load() for entry in entry_points(group="prefixd.settings")}


def load_settings(cls: type[AnySettings], argv: Sequence[str], prog: str, description: str) -> AnySettings:
    """The settings of one run. Nonsense ends the process: one line that names the setting, exit code 2."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings (also: {CONFIG_VARIABLE})")
    for name in cls.model_fields:
        _add_flag(parser, cls, name)
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    config = flags.pop("config", None) or os.environ.get(CONFIG_VARIABLE)
    try:
        return _merge(cls, config, os.environ, flags)
    except SettingsError as error:
        parser.error(str(error))


def to_flags(settings: ProcessSettings, cls: type[ProcessSettings]) -> list[str]:
    """Flags that give a process with settings `cls` exactly the values that `settings` holds."""
    flags: list[str] = []
    for name in cls.model_fields:
        value = getattr(settings, name)
        if isinstance(value, bool):
            flags.append(_flag(name) if value else _flag("no_" + name))
        elif isinstance(value, tuple):
            flags.extend(f"{_flag(name)}={item}" for item in value)
        elif value is not None:
            flags.append(f"{_flag(name)}={value}")
        elif _AUTO_IS_NONE in cls.model_fields[name].metadata:
            flags.append(f"{_flag(name)}=auto")
    return flags


def describe_default(cls: type[ProcessSettings], name: str) -> str:
    """The default of a setting as one would write it."""
    field = cls.model_fields[name]
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None and _AUTO_IS_NONE in field.metadata:
        return "auto"
    if value is None or value == ():
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    return format_size(value) if _SIZE in field.metadata else str(value)


def _merge(
    cls: type[AnySettings], config: str | None, environ: Mapping[str, str], flags: dict[str, Any]
) -> AnySettings:
    owners: list[type[ProcessSettings]] = [cls, *process_settings().values()]
    known = {name for owner in owners for name in owner.model_fields}
    in_file = _read_file(Path(config), known) if config else {}
    in_environment = _read_environment(environ, known)
    given = {**in_file, **in_environment, **flags}
    mine = {name: given[name] for name in cls.model_fields if name in given}
    for name, value in mine.items():
        if isinstance(value, bool) and cls.model_fields[name].annotation is not bool:
            raise SettingsError(
                f"{name}: true and false are no values for it (from {config})"
            )  # pydantic: 1 and 0
    try:
        return cls.model_validate(mine)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name in flags:
            source = "flag"
        elif name in in_environment:
            source = ENV_PREFIX + name.upper()
        else:
            source = str(config)
        raise SettingsError(f"{_describe(name, given[name], error)} (from {source})") from error


def _read_file(path: Path, known: Iterable[str]) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad UTF-8 and bad TOML alike
        raise SettingsError(f"config: {path} is not TOML: {error}") from error
    for name in values:
        if name not in known:
            raise SettingsError(f"{name}: no such setting (from {path})")
    return values


def _read_environment(environ: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Values of `PREFIXD_*` variables; an empty one counts as not set."""
    values = {
        variable.removeprefix(ENV_PREFIX).lower(): value
        for variable, value in environ.items()
        if variable.startswith(ENV_PREFIX) and variable != CONFIG_VARIABLE and value
    }
    for name in values:
        if name not in known:
            raise SettingsError(f"{name}: no such setting (from {ENV_PREFIX}{name.upper()})")
    return values


def _describe(name: str, value: object, error: ValidationError) -> str:
    """One line on what is wrong with a value. Of a union's complaints the last is on the most general type."""
    faults = error.errors(include_url=False, include_input=False)
    message = [fault["msg"] for fault in faults if fault["loc"][0] == name][-1]
    return f"{name}: {message.removeprefix('Value error, ')}, not {value!r}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_flag(parser: argparse.ArgumentParser, cls: type[ProcessSettings], name: str) -> None:
    field = cls.model_fields[name]
    text = f"{field.description} (default: {describe_default(cls, name)})".replace("%", "%%")
    if field.annotation is bool:
        parser.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if get_origin(field.annotation) is Literal:
        metavar = "{" + ",".join(get_args(field.annotation)) + "}"
    else:
        metavar = name.rsplit("_", 1)[-1].upper()
    repeatable = get_origin(field.annotation) is tuple
    parser.add_argument(_flag(name), action="append" if repeatable else "store", metavar=metavar, help=text)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")
