"""`Run`: a run, opened to look at it and to use what it has made. It reads, and changes nothing of what the run is."""

from typing import TYPE_CHECKING

from checkpoints.listing import CheckpointRow, rows
from launcher.extras import optional
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.run import record as runs
from launcher.runtime.run.history import read_history
from launcher.runtime.run.step_table import Record

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn
    from transformers import PreTrainedModel

    from launcher.app.api.stream import StepDataset
    from launcher.observe.inspect.show import Shown
    from launcher.observe.inspect.status import RunStatus

_FRAMES = "a frame of a run's figures"


def open_run(uri: str) -> "Run":
    """The run at a folder or s3:// URI. Never creates one: `maskfleet init` does.

    Raises:
        RunError: there is no run, or its files are damaged.
        StoreError: the store cannot be read.
    """
    return Run(runs.open_run(uri))


class Run:
    """A run at its URI. Everything is read when it is asked for, so a run that trains may be looked at meanwhile.

    Every method raises StoreError where the store cannot be read.
    """

    def __init__(self, opened: runs.Run) -> None:
        self._opened = opened

    def __repr__(self) -> str:
        return f"<run {self.name} at {self.uri}>"

    @property
    def uri(self) -> str:
        """Its folder or s3:// URI."""
        return self._opened.uri

    @property
    def name(self) -> str:
        """The recipe's `name`."""
        return self._opened.recipe.name

    @property
    def recipe(self) -> Recipe:
        """The complete recipe, with every default written out."""
        return self._opened.recipe

    @property
    def total_steps(self) -> int:
        """The steps of all phases together."""
        return self._opened.recipe.total_steps

    def status(self) -> "RunStatus":
        """What `maskfleet runs status` says: how far it is, where it runs, interruptions, goodput."""
        import time

        from launcher.observe.inspect.status import status

        return status(self._opened, time.time())

    def checkpoints(self) -> list[CheckpointRow]:
        """Its checkpoints, newest first."""
        return rows(self._opened.store)

    def metrics(self) -> "pd.DataFrame":
        """The step records of the committed lineage: a row for each step, indexed by `step`, a float64 column for every
        figure (infra/docs/records.md names them), NaN where a record has no number.

        Raises MissingPackage: pandas is not installed.
        """
        pandas = optional("pandas", _FRAMES)
        steps = read_history(self._opened.store).steps
        columns = {name: steps.column(name) for name in sorted(steps.fields - {"step"})}
        return pandas.DataFrame(columns, index=pandas.Index(steps.numbers.astype("int64"), name="step"))

    def evaluations(self) -> "pd.DataFrame":
        """The evaluations on held-out text, indexed by `step`, the number of steps done before. Raises as `metrics`."""
        return _frame(read_history(self._opened.store).evaluations, "step")

    def events(self) -> "pd.DataFrame":
        """What happened to the run, indexed by `time` (UTC). Fields depend on `kind`. Raises as `metrics`."""
        frame = _frame(read_history(self._opened.store).events, "time")
        frame.index = optional("pandas", _FRAMES).to_datetime(frame.index, unit="s", utc=True)
        return frame

    def sample(self, step: int, row: int = 0) -> "Shown":
        """Row `row` of the global batch of step `step`, past or future; `print` shows its text with the masks marked.

        Raises:
            RunError: the run has no such step, or the step no such row.
            CorpusError: the corpora are not what they were.
        """
        from launcher.observe.inspect.show import find_sample

        return find_sample(self._opened, step, row)

    def stream(self, rank: int = 0, world: int = 1, start: int = 0, stop: int | None = None) -> "StepDataset":
        """The training data of steps `start` to `stop` (None: the last), as rank `rank` of `world` gets it, for another
        trainer. Raises RunError: no such steps or ranks."""
        from launcher.app.api.stream import StepDataset

        return StepDataset(self.uri, rank=rank, world=world, start=start, stop=stop)

    def module(self, step: int | None = None) -> "nn.Module":
        """The network as it was trained, objective's heads included, with the weights of the checkpoint of `step`
        (None: the newest good one): fp32, on the CPU, in evaluation mode. Its encoder takes `encoder_core.batch.Batch`.

        Raises:
            RunError: there is no such checkpoint. CheckpointError: it is damaged.
            TokenizerError: the run's tokenizer cannot be read.
        """
        from launcher.app.api.models import module

        return module(self._opened, step)

    def transformers_model(self, step: int | None = None, part: str | None = None) -> "PreTrainedModel":
        """The same weights as the class of `transformers` that an export is for.

        Args:
            step: of the checkpoint; None: the newest good one.
            part: of a generator and a discriminator which; None: the discriminator, or the only network.

        Raises:
            MissingPackage: transformers is not installed.
            RunError, CheckpointError, TokenizerError: as `module`, and for a part that the run does not have.
        """
        from launcher.app.api.models import transformers_model

        return transformers_model(self._opened, step, part)


def _frame(records: tuple[Record, ...], index: str) -> "pd.DataFrame":
    pandas = optional("pandas", _FRAMES)
    frame = pandas.DataFrame.from_records(list(records))
    return frame.set_index(index) if len(records) else pandas.DataFrame(index=pandas.Index([], name=index))
