"""The verbs of `forerun` and their arguments. What each does is in the module that its work imports."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun import __version__
from forerun.checkpoint.files import DEMO_MODEL
from forerun.errors import UsageError

Work = Callable[[], int]

app = typer.Typer(
    name="forerun",
    help="Multi-token prediction for LLM post-training: train the MTP block, roll out with it, losslessly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="FORERUN_TRACEBACK=1 shows where an error came from.",
)


class Head(StrEnum):
    """Which MTP head the demo decodes with."""

    shipped = "shipped"
    fresh = "fresh"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer tokens, same phases: under 4 minutes.")] = False,
    out: Annotated[Path, typer.Option(help="Directory for everything the demo writes; run again to resume.")] = (
        DEMO_MODEL.parent
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of data order, initialisation and sampling.")] = 0,
    model: Annotated[
        Path | None, typer.Option(help="A Llama- or Qwen-like Hugging Face directory instead of SmolLM2-135M-Instruct.")
    ] = None,
    head: Annotated[
        Head | None, typer.Option(help="MTP head for rollout and RL: the shipped one, or the one trained in this run.")
    ] = None,
) -> Work:
    """Run the whole loop on a real small model: attach, SFT, rollout, RL, export, report."""

    def work() -> int:
        # GNU OpenMP reads it when torch is imported. Its threads wait for one another by spinning, by default for some
        # 10 ms: where another program takes a core, decoding then waits for that one's time slices, and halves.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        from forerun.demo import DemoOptions, run

        chosen: dict[str, Any] = {} if head is None else {"head": head.value}
        return run(DemoOptions(quick=quick, out=out, seed=seed, model=model, **chosen))

    return work


Configuration = Annotated[
    list[str],
    typer.Argument(
        metavar="[CONFIG.yaml] key=value ...",
        help="The run's configuration, and settings by dotted key that win over the file's, or over the defaults.",
        show_default=False,
    ),
]


def _show_settings(name: str) -> Callable[[bool], None]:
    def show(wanted: bool) -> None:
        if wanted:
            from forerun import config, config_file

            print(config_file.all_settings(getattr(config, name)))
            raise typer.Exit

    return show


_SETTINGS_HELP = "Print every setting with its default, as a configuration to edit, and exit."


def _file_and_overrides(given: list[str]) -> tuple[Path | None, list[str]]:
    if "=" in given[0] and not Path(given[0]).exists():
        return None, given
    return Path(given[0]), given[1:]


@app.command()
def sft(
    config: Configuration,
    settings: Annotated[
        bool,
        typer.Option("--settings", help=_SETTINGS_HELP, callback=_show_settings("SFTConfig"), is_eager=True),
    ] = False,
) -> Work:
    """Supervised fine-tuning of a model and its MTP block, or of the block alone."""

    def work() -> int:
        from forerun.launch.command import run

        run("sft", *_file_and_overrides(config))
        return 0

    return work


@app.command()
def rl(
    config: Configuration,
    settings: Annotated[
        bool,
        typer.Option("--settings", help=_SETTINGS_HELP, callback=_show_settings("RLConfig"), is_eager=True),
    ] = False,
) -> Work:
    """Reinforcement learning on verifiable rewards, with speculative rollouts."""

    def work() -> int:
        from forerun.launch.command import run

        run("rl", *_file_and_overrides(config))
        return 0

    return work


@app.command()
def generate(
    model: Annotated[Path, typer.Option(help="Hugging Face directory, with or without MTP tensors.")],
    prompt: Annotated[list[str], typer.Option(help="What the user says; repeat it for several prompts.")],
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens to draft per step; 0 is off. Default: 1 if the model carries MTP.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among so many of the likeliest tokens; 0 is all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Least probability of a token, as a share of the likeliest one's; 0 is off.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an answer (and is printed); repeat it for several.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Answers for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
) -> Work:
    """Answer prompts with the native engine, drafting with the model's MTP block. Text to stdout, figures to stderr."""

    def work() -> int:
        from forerun.generation import GenerateOptions, generate_text

        options = GenerateOptions(
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=tuple(stop or ()),
            max_tokens=max_tokens,
            n=n,
            seed=seed,
        )
        return generate_text(model, prompt, options)

    return work


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint directory.", show_default=False)],
    values: Annotated[
        bool, typer.Option("--values", help="Also read the MTP tensors: zeros, NaN, never trained, copies that differ.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also run the model: acceptance with controls. Implies --values.")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="Text file to run it on, instead of the built-in text.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> Work:
    """Say what is wrong with a checkpoint's MTP block and how to mend it. Exits 0 if nothing, 1 if something is."""

    def work() -> int:
        from forerun.doctor import inspect as look

        return look(path, values=values, deep=deep, text=text, as_json=as_json)

    return work


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint directory.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; a new one.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            help="What to write: mimo (vLLM drafts with it, for an attached head), megatron (Megatron-Core's names), "
            "hf (back from those, or out of a run's checkpoint-N) or bfloat16 (of a checkpoint in FP8)."
        ),
    ],
    fold_norm: Annotated[
        bool,
        typer.Option(
            "--fold-norm",
            help="For mimo: move the trunk's final norm into an untied LM head, so that any engine reads the hidden "
            "that the head was trained on, for every drafted token.",
        ),
    ] = False,
) -> Work:
    """Write a checkpoint in another layout, or say why it does not fit there."""

    def work() -> int:
        from forerun.checkpoint.dequantise import dequantise
        from forerun.checkpoint.megatron import from_megatron, to_megatron
        from forerun.families.serving import TARGETS
        from forerun.models.serving import export
        from forerun.report.progress import ProgressBar
        from forerun.trainers.checkpoint_model import export_checkpoint, is_run_checkpoint

        def to_bfloat16(source: Path, out: Path) -> None:
            with ProgressBar("convert", None, "tensors") as bar:

                def report(done: int, total: int) -> None:
                    bar.expect(total)
                    bar.advance(done - bar.done)

                dequantise(source, out, report=report)

        layouts = {"bfloat16": to_bfloat16, "megatron": to_megatron, "hf": from_megatron} | {
            name: partial(export, to=name, fold_norm=fold_norm) for name in TARGETS
        }
        if to not in layouts:
            raise UsageError(f"cannot convert to {to!r}: choose one of {', '.join(sorted(layouts))}")
        if fold_norm and to not in TARGETS:
            raise UsageError(f"--fold-norm is for what an engine serves ({', '.join(TARGETS)}), not for {to}")
        if to == "hf" and is_run_checkpoint(source):
            export_checkpoint(source, out)
        else:
            layouts[to](source, out)
        print(f"{out}: {to} checkpoint of {source}")
        return 0

    return work


planning = typer.Typer(invoke_without_command=True)
app.add_typer(planning, name="plan")
PlannedModel = Annotated[
    str | None, typer.Option(help="Checkpoint directory, config.json, or a known model: deepseek-r1, mimo-7b, ...")
]
PlannedHardware = Annotated[
    str | None, typer.Option(help="Spec sheet: h100, h200, h20, h800, a100, b200, gaudi2, gaudi3 or cpu.")
]


@planning.callback()
def plan(
    context_: typer.Context,
    model: PlannedModel = None,
    hardware: PlannedHardware = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Instead, measure steps and acceptance here, with the native engine.")
    ] = False,
    acceptance: Annotated[
        str | None, typer.Option(help="Accepted drafts per draft at each depth: 0.88,0.77,0.66.", metavar="A,B,...")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Without --acceptance: measure it on this text (--calibrate: prompts, by line).")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the rollouts, for what is measured.")] = 0.0,
    batch: Annotated[
        str,
        typer.Option(
            help="Rows: 32, a list 32,8,1, rows:tokens 32:100,1:900, a long tail tail:ROWS:LONGEST, or @FILE of "
            "completion lengths."
        ),
    ] = "tail:32:2048",
    prompt_length: Annotated[int, typer.Option(min=0, help="Tokens of a prompt, before known lengths.")] = 512,
    context: Annotated[float, typer.Option(min=1, help="Tokens in a row's cache, where lengths are not known.")] = 1024,
    max_depth: Annotated[
        int | None, typer.Option(min=1, max=16, help="Deepest depth. Default: those of --acceptance, or 3.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="float32, bfloat16 or fp8. Default: the config's.")] = None,
    kv_cache: Annotated[str, typer.Option(help="float32, bfloat16 or fp8.")] = "bfloat16",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share each layer and its experts.")] = 1,
    eager: Annotated[bool, typer.Option("--eager", help="The engine launches kernels one by one.")] = False,
    max_step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens that the engine takes in one decode step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> Work | None:
    """Predict whether speculation pays, at what depth and up to what batch size. Loads no model unless it measures."""
    if context_.invoked_subcommand is not None:
        return None

    def work() -> int:
        if model is None:
            raise UsageError("Missing option '--model' (see forerun plan --help)")
        from forerun.planner.command import PlanOptions, parse_acceptance, parse_precision, run
        from forerun.planner.cost import Deployment

        return run(
            PlanOptions(
                model=model,
                hardware=hardware,
                acceptance=None if acceptance is None else parse_acceptance(acceptance),
                text=text,
                temperature=temperature,
                batch=batch,
                prompt_length=prompt_length,
                context=context,
                max_depth=max_depth,
                weights=None if weights is None else parse_precision(weights, "--weights"),
                deployment=Deployment(
                    tensor_parallel=tensor_parallel,
                    launch="eager" if eager else "graph",
                    cache=parse_precision(kv_cache, "--kv-cache"),
                    max_tokens=max_step_tokens,
                ),
                calibrate=calibrate,
                as_json=as_json,
            )
        )

    return work


@planning.command()
def train(
    config: Configuration,
    hardware: PlannedHardware = None,
    model: Annotated[
        str | None, typer.Option(help="In place of model.path: a config.json, or a known model such as mimo-7b.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")] = False,
) -> Work:
    """Estimate what a rank of `forerun sft` or `forerun rl` needs in memory, and what ranks send. Loads no weights."""

    def work() -> int:
        from forerun.planner.train_command import run

        return run(*_file_and_overrides(config), model, hardware, as_json)

    return work


@app.command()
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN_DIR ...", help="What runs wrote: their trainer.output_dir.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> Work:
    """Show a run, or several beside each other, on one HTML page: curves, sample completions, alarms, settings."""

    def work() -> int:
        from forerun.report.page import write_report

        print(write_report(run_dirs, out))
        return 0

    return work
