"""What a training run takes: the peak of a rank with MTP and without, whether a device has room, what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from forerun.planner.from_config import Job
from forerun.planner.hardware import Hardware
from forerun.planner.megatron_memory import megatron_peaks
from forerun.planner.memory import Peak, static_parts, torch_peaks
from forerun.planner.serving_memory import USABLE
from forerun.planner.shape import shown_weights
from forerun.planner.traffic import Traffic, arithmetic_seconds, traffic
from forerun.planner.training import TrainingRun

GIB = 2**30


@dataclass(frozen=True)
class TrainPlan:
    """The figures of one run.

    Attributes:
        job: what was planned.
        hardware: the device of every rank; None where none is named.
        peaks: of a step's phases, on the fullest rank.
        without: the same without MTP; empty where the run has none.
        traffic: what a rank sends in an optimizer step.
    """

    job: Job
    hardware: Hardware | None
    peaks: list[Peak]
    without: list[Peak]
    traffic: list[Traffic]

    @property
    def peak(self) -> float:
        """Bytes of the fullest moment."""
        return max(peak.total for peak in self.peaks)

    @property
    def fits(self) -> bool | None:
        """Whether the device has room; None where none is named."""
        return None if self.hardware is None else self.peak <= USABLE * self.hardware.memory

    def compute_seconds(self, mtp: bool = True) -> float | None:
        """Arithmetic of an optimizer step; None where no device is named."""
        return None if self.hardware is None else arithmetic_seconds(self.job.run, self.hardware, mtp)

    @property
    def loading(self) -> float:
        """Bytes of rank 0's machine's own memory while the model loads: of the torch engine's ranks it alone reads it.

        Of the Megatron engine, whose ranks read what they hold: 0.
        """
        run = self.job.run
        if run.layout.engine == "megatron" or run.layout.ranks == 1:
            return 0.0
        return run.parameters * run.weight_bytes

    def sentence(self) -> str:
        """Whether it fits, or what to change."""
        if self.hardware is None:
            return (
                f"The fullest rank needs {_gib(self.peak)} in its {self._fullest()}: name a device with --hardware to "
                "see whether that fits."
            )
        room = _gib(USABLE * self.hardware.memory)
        said = f"{_gib(self.peak)} in its {self._fullest()}, of the {room} usable on {self.hardware.name}"
        if self.fits:
            return f"It fits: {said}."
        for change, job in remedies(self.job):
            tried = make_train_plan(job, self.hardware)
            if tried.fits:
                return f"It does not fit: {said}; {change} brings it to {_gib(tried.peak)}."
        return f"It does not fit: {said}; no single setting mends that, so take more ranks or a smaller model."

    def _fullest(self) -> str:
        return max(self.peaks, key=lambda peak: peak.total).phase


def make_train_plan(job: Job, hardware: Hardware | None) -> TrainPlan:
    """The figures of a job on a device."""
    without: list[Peak] = []
    if job.run.depths:
        plain = replace(job.run, depths=0, chained=0, train_mtp=False)
        if plain.trained_parameters:  # of a head trained alone nothing would be left
            without = _peaks(replace(job, run=plain), hardware)
    return TrainPlan(job, hardware, _peaks(job, hardware), without, traffic(job.run))


def remedies(job: Job) -> Iterator[tuple[str, Job]]:
    """Changes of one setting each, the cheapest first; then the two that cost only time together."""
    run, layout = job.run, job.run.layout
    torch = layout.engine == "torch"
    recompute = "engine.activation_recompute=true" if torch else "engine.megatron.recompute_granularity=full"
    if run.rows > 2:
        half = run.rows // 2
        fewer = replace(run, rows=half, micro_batches=run.micro_batches * run.rows // half)
        yield f"micro_batch_size={half}", replace(job, run=fewer)
    least, said = _smallest_micro_batches(run)
    if said:
        yield said, replace(job, run=least)
    if not run.recompute:
        yield recompute, replace(job, run=replace(run, recompute=True))
        if said:
            yield f"{recompute} with {said}", replace(job, run=replace(least, recompute=True))
    if torch and layout.shards < layout.ranks:
        yield "engine.fsdp_size=null", replace(job, run=replace(run, layout=replace(layout, shards=layout.ranks)))
    best = replace(least, recompute=True)
    changes = " and ".join([recompute] * (not run.recompute) + [said] * bool(said))
    factor = 2
    while factor <= 64:
        more = replace(layout, ranks=layout.ranks * factor, shards=layout.shards * factor if torch else layout.shards)
        yield f"{more.ranks} ranks{changes and f' with {changes}'}", replace(job, run=replace(best, layout=more))
        factor *= 2


def _smallest_micro_batches(run: TrainingRun) -> tuple[TrainingRun, str]:
    """The run with one row, or one longest response, at a time, and the setting that says so; "" where it is so."""
    if run.document_length is not None:
        times = run.row_length // run.document_length
        shorter = replace(run, row_length=run.document_length, packed=False, micro_batches=run.micro_batches * times)
        limit = -(-run.document_length // run.layout.context)
        return shorter, f"ppo_max_token_len_per_gpu={limit}" if run.row_length > run.document_length else ""
    return replace(run, rows=1, micro_batches=run.micro_batches * run.rows), (
        "micro_batch_size=1" if run.rows > 1 else ""
    )


def _peaks(job: Job, hardware: Hardware | None) -> list[Peak]:
    run = job.run
    if run.layout.engine == "megatron":
        peaks = megatron_peaks(run)
        static = {name: peaks[0].parts[name] for name in ("weights", "optimizer", "reference policy")}
    else:
        peaks, static = torch_peaks(run), static_parts(run)
    if job.rollout is None:
        return peaks
    stays, cache = job.rollout_stays, job.rollout.rows * job.rollout.row
    if job.rollout_share is not None and hardware is not None:
        stays = job.rollout_share * hardware.memory
        cache = stays - job.rollout.weights
    while_training = [Peak(peak.phase, {**peak.parts, "rollout engine": stays}) for peak in peaks]
    return [*while_training, Peak("rollout", {**static, "rollout engine": job.rollout.weights, "rollout cache": cache})]


def describe(run: TrainingRun) -> str:
    """The run in a line."""
    mtp = f"MTP x {run.chained}" if run.depths else "no MTP"
    if run.train_mtp:
        mtp += ", heads" if run.isolated else ", joint"
    elif run.depths:
        mtp += ", kept"
    batch = f"{run.rows} x {run.row_length} tokens a micro-batch, {run.micro_batches} of them a step"
    return f"{shown_weights(run.parameters)} weights, {run.layout}; {batch}; {mtp}" + (
        "; recompute" if run.recompute else ""
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
