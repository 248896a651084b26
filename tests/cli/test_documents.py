"""What README and docs/ name is there: pages and their sections, files, tests, modules, options, settings."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from typer.main import get_command

from forerun.cli.verbs import app
from forerun.config import RLConfig, SFTConfig
from forerun.config_file import load_config
from forerun.errors import UsageError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# Of verl, SkyRL, vLLM's forks, SGLang and vLLM; and a pattern.
ELSEWHERE = re.compile(
    r"docs/advance/|examples/(mtp_trainer|spec_decode|deepseek_on_gaudi)|layers/|.*/eagle_utils|models/mimo\.py|inference/"
    r"|tests/oracles/NAME\.txt"
)
PROGRAMS = ("pytest", "python", "python3.12", "forerun", "torchrun")


def text_of(page: Path) -> str:
    """A page with lines that a backslash continues made one; of a recipe its comments."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".yaml":
        text = "\n".join(line.partition("#")[2] for line in text.splitlines())
    return re.sub(r"\\\n\s*", "", text)


def inline(page: Path) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL))


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where, words) of every command that begins a line or stands between backticks."""
    for page in [*PAGES, *RECIPES]:
        lines = [re.sub(r"^[\d. ]*(?:[A-Z_]+=\S* +)*", "", line) for line in text_of(page).splitlines()]
        for line in [*lines, *inline(page)]:
            for command in re.sub(r"\s+#.*", "", line).split(" && "):
                if command.split(" ")[0] in PROGRAMS and "<" not in command:
                    with suppress(ValueError):  # prose: a quote without its other end
                        yield f"{page.name}: {command}", shlex.split(re.sub(r"[\[\]](?!\S*=)", " ", command))


def test_links_lead_somewhere() -> None:
    def anchor(heading: str) -> str:  # as GitHub makes it
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    broken, seen = [], 0
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if link.startswith("https://"):
                continue
            seen += 1
            name, _, section = link.partition("#")
            target = page.parent / name if name else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if section else []
            if not target.exists() or (section and section not in map(anchor, headings)):
                broken.append(f"{page.name}: {link}")
    assert seen > 40 and not broken


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(
        r"(?<![\w/.~{-])((?:docs|tests|forerun|benchmarks|recipes|examples)/[\w./-]*\w|(?:\w+/)+\w+\.(?:py|md|yaml|txt))"
    )
    lost, seen = [], 0
    for page in [*PAGES, *RECIPES]:
        for name in named.findall(text_of(page)):
            if ELSEWHERE.match(name):
                continue
            seen += 1
            places = (ROOT, ROOT / "forerun", page.parent)
            # docs/decisions/0007 will do
            if not any((place / name).exists() or any(place.glob(f"{name}-*")) for place in places):
                lost.append(f"{page.name}: {name}")
    assert seen > 200 and not lost


def test_test_commands_find_tests() -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    known = {marker.partition(":")[0] for marker in markers} | {"not"}
    wrong, seen = [], 0
    for where, words in commands():
        arguments = words[3:] if words[1:3] == ["-m", "pytest"] else words[1:] if words[0] == "pytest" else None
        if arguments is None:
            continue
        seen += 1
        options = dict(pairwise(arguments))
        paths = [ROOT / word for word in arguments if word.startswith("tests")]
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        wrong += [f"{where}: no {path.name}" for path in paths if not path.exists()]
        wrong += [f"{where}: no marker {name}" for name in options.get("-m", "").split() if name not in known]
        if "-k" in options:
            text = "".join(f"{file.name} {file.read_text(encoding='utf-8')}" for file in files)
            wrong += [f"{where}: no {word}" for word in options["-k"].split() if word not in text]
    assert seen > 80 and not wrong


def test_programs_have_the_options_that_they_are_given() -> None:
    verbs: dict[str, Any] = vars(get_command(app))["commands"]
    wrong, seen = [], 0
    for where, words in commands():
        given = {word for word in words if word.startswith("--")}
        match words:
            case ["python", "-m", module, *_] if module.startswith(("forerun.", "tests.")):
                spec = find_spec(f"{module}.__main__" if (ROOT / module.replace(".", "/")).is_dir() else module)
                source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else None
            case ["python", file, *_] if file.endswith(".py"):
                source = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else None
            case ["forerun", verb, *rest] if not verb.startswith("--"):
                command: Any = verbs.get(verb)
                if verb == "plan" and rest[:1] == ["train"]:
                    command = command.commands["train"]
                source = None if command is None else str([parameter.opts for parameter in command.params])
            case _:
                continue
        seen += 1
        if source is None or not all(re.search(rf"[\"']{option}[\"']", source) for option in given):
            wrong.append(where)
    assert seen > 100 and not wrong


def test_settings_of_commands_are_taken() -> None:
    """Each by itself and together, as far as that can be said without a model."""
    runs: dict[tuple[type[Any], Path | None, tuple[str, ...]], str] = {}
    for where, words in commands():
        match words:
            case ["forerun", "plan", "train", *arguments]:
                kind: type[Any] = RLConfig
            case ["forerun", "sft" | "rl" as verb, *arguments]:
                kind = {"sft": SFTConfig, "rl": RLConfig}[verb]
            case _:
                continue
        recipe = next((ROOT / word for word in arguments if word.startswith("recipes/")), None)
        settings = [word for word in arguments if "=" in word and word != "key=value"]
        # there is no such interpreter here
        settings = [re.sub(r"^rollout\.python=.*", f"rollout.python={sys.executable}", word) for word in settings]
        if settings:
            runs[kind, recipe, tuple(settings)] = where
    assert len(runs) > 30
    refused = []
    for (kind, recipe, given), where in runs.items():
        try:
            load_config(kind, recipe, [*([] if recipe else ["model.path=x", "data.train_files=x"]), *given])
        except UsageError as error:
            refused.append(f"{where}: {error}")
    assert not refused


def test_settings_that_pages_name_exist() -> None:
    def keys(settings: dict[Any, Any], section: str = "") -> Iterator[str]:
        for name, value in settings.items():
            yield f"{section}{name}"
            if isinstance(value, dict):
                yield from keys(value, f"{section}{name}.")

    trees: list[Any] = [OmegaConf.to_container(OmegaConf.structured(config)) for config in (SFTConfig, RLConfig)]
    known = {key for tree in trees for key in keys(tree)}
    sections = {key.partition(".")[0] for key in known if "." in key}
    unknown, seen = [], 0
    for page in PAGES:
        if page.name == "migrating.md":  # has those of others; tests/oracles/test_migrating.py reads it
            continue
        for name in (word.partition("=")[0] for code in inline(page) for word in code.split()):
            if not re.fullmatch(rf"(?:{'|'.join(sections)})(?:\.[a-z_]\w*)+", name) or name == "model.save_pretrained":
                continue
            if re.search(r"\.(?:safetensors|json|md)\b", name) or ".override_config." in name:
                continue
            seen += 1
            if name not in known:
                unknown.append(f"{page.name}: {name}")
    assert seen > 100 and not unknown
