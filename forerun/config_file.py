"""A run's configuration from one YAML file and `key=value` pairs, and back into a file.

Every mistake names its dotted key: an unknown key (with the nearest valid one), a value of the wrong type.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forerun.config_check import check, type_name
from forerun.errors import UsageError, one_line
from forerun.report.atomic import write_text

RESOLVED_CONFIG = "config.yaml"
# Keys of verl and TRL, or their ends, that are not like ours (docs/migrating.md has all).
_ELSEWHERE = {
    "beta": "algorithm.kl_loss_coef",
    "clip_grad": "optim.max_grad_norm",
    "custom_reward_function.path": "reward.function",
    "default_local_dir": "trainer.output_dir",
    "enable_gradient_checkpointing": "engine.activation_recompute",
    "epsilon": "algorithm.clip_ratio_low",
    "gradient_checkpointing": "engine.activation_recompute",
    "learning_rate": "optim.lr",
    "max_completion_length": "rollout.max_response_length",
    "max_steps": "trainer.total_steps",
    "num_generations": "rollout.n",
    "num_iterations": "ppo_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "report_to": "trainer.logger",
    "rollout.name": "rollout.engine",
}
Config = TypeVar("Config", bound=object)


def load_config(cls: type[Config], yaml_path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A checked instance of the dataclass `cls`: its defaults, then the YAML file, then `key=value` overrides.

    Raises:
        UsageError: the file cannot be read or is no mapping; a key is unknown, a value of the wrong type or out of
            range. One line, with the full dotted key.
    """
    merged = OmegaConf.structured(cls)
    if yaml_path is not None:
        _merge(cls, merged, read_yaml(Path(yaml_path)), f" in {yaml_path}")
    for text in overrides:
        _merge(cls, merged, _parse_override(text), "")
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:  # what is left is an interpolation that leads nowhere
        raise UsageError(f"{error.full_key or 'configuration'}: {_first_line(error)}") from error
    except ValueError as error:  # a dataclass's own validation
        raise UsageError(_first_line(error)) from error
    assert isinstance(config, cls)
    check(config)
    return config


def settings_of_one(cls: type, other: type, yaml_path: str | Path | None, overrides: Sequence[str] = ()) -> set[str]:
    """The keys that are given, in the file or as overrides, and that `cls` has at its top and `other` has not."""
    given = {text.partition("=")[0].partition(".")[0] for text in overrides}
    if yaml_path is not None:
        with suppress(UsageError):  # `load_config` says what is wrong with the file
            given |= read_yaml(Path(yaml_path)).keys()
    return given & ({item.name for item in fields(cls)} - {item.name for item in fields(other)})


def save_config(config: object, directory: str | Path) -> Path:
    """Write the resolved configuration as `config.yaml` into `directory` (made if need be); returns its path.

    `load_config(type(config), path)` gives an equal object.
    """
    path = Path(directory) / RESOLVED_CONFIG
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config)))
    return path


def all_settings(cls: type) -> str:
    """The dataclass's settings as YAML, each with its default and what may stand there; `load_config` reads it back."""
    return "\n".join(_described(cls(), ""))


def _described(section: Any, indent: str) -> Iterator[str]:
    hints = typing.get_type_hints(type(section))
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            yield f"{indent}{item.name}:"
            yield from _described(value, indent + "  ")
        else:
            text = OmegaConf.to_yaml({item.name: value}).strip()
            shown = f"{item.name}: [{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else text
            yield f"{indent}{shown}  # {type_name(hints[item.name])}"


def read_yaml(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UsageError(f"no such configuration file: {path}")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # the YAML parser's errors have no common base that OmegaConf exports
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path} must hold `key: value` lines, not a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip() or key.startswith("-"):
        raise UsageError(f"{text!r} is not an override: write key=value, for example trainer.seed=1")
    try:
        loaded = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False)
    except Exception as error:  # as above
        raise UsageError(f"cannot read the override {text!r}: {one_line(error)}") from error
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def _merge(cls: type, into: Any, values: Mapping[str, Any], where: str) -> None:
    """Set each value by itself, so that a refusal is about one key whose value is known."""
    for key, value, hint in _leaves(cls, values, "", where, cls):
        if typing.get_origin(hint) is list and isinstance(value, str):  # one file, as verl takes it
            value = [value]
        try:
            OmegaConf.update(into, key, value, merge=True)
        except (OmegaConfBaseException, TypeError) as error:
            raise UsageError(f"{key}={_shown(value)} must be {type_name(hint)}{where}") from error


def _leaves(
    cls: type, values: Mapping[str, Any], prefix: str, where: str, root: type
) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, value, type) of every setting; sections are walked, a `dict` field is one setting."""
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in {item.name for item in fields(cls)}:
            while isinstance(value, Mapping) and value:  # an unknown section: its first setting says more
                name, value = next(iter(value.items()))
                key = f"{key}.{name}"
            raise UsageError(f"unknown configuration key {key}{where}; {_nearest(key, root)}")
        hint = hints[name]
        if not is_dataclass(hint):
            yield key, value, hint
        elif isinstance(value, Mapping):
            yield from _leaves(typing.cast(type, hint), value, key + ".", where, root)
        else:
            example = f"{key}.{fields(hint)[0].name}"
            raise UsageError(f"{key}={_shown(value)} must be a section with keys such as {example}{where}")


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name


def _nearest(key: str, root: type) -> str:
    """The valid key most like `key`: of those with its last part, as a whole, or else by a last part like its own."""
    valid = list(_keys(root))
    for theirs, ours in _ELSEWHERE.items():
        if ours in valid and f".{key}".endswith(f".{theirs}"):
            return f"did you mean {ours}?"
    last = key.rpartition(".")[2]
    if same := [name for name in valid if name.rpartition(".")[2] == last]:
        return f"did you mean {difflib.get_close_matches(key, same, n=1, cutoff=0.0)[0]}?"
    if close := difflib.get_close_matches(key, valid, n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    by_name = {name.rpartition(".")[2]: name for name in reversed(valid)}
    if close := difflib.get_close_matches(last, by_name, n=1, cutoff=0.7):
        return f"did you mean {by_name[close[0]]}?"
    nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]
    return f"the nearest valid key is {nearest}; docs/migrating.md has the names of verl and TRL beside ours"


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).replace("\n", " ")
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
