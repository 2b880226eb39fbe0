"""`Run`: a run, opened to inspect it and to use its results. It only reads: it never changes the run."""

from typing import TYPE_CHECKING

from checkpoints.listing import CheckpointRow, checkpoint_rows
from launcher.errors import import_optional
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

_PANDAS_PURPOSE = "a data frame of a run's records"


def open_run(uri: str) -> "Run":
    """Open the run at a folder or s3:// URI. It must exist: `maskfleet init` creates runs.

    Raises:
        RunError: there is no run at `uri`, or its files are damaged.
        StoreError: the store cannot be read.
    """
    return Run(runs.open_run(uri))


class Run:
    """A run at its URI. Every call reads the store again, so a run can be inspected while it trains.

    Every method raises StoreError if the store cannot be read.
    """

    def __init__(self, opened: runs.Run) -> None:
        self._opened = opened

    def __repr__(self) -> str:
        return f"<run {self.name} at {self.uri}>"

    @property
    def uri(self) -> str:
        """The run's folder or s3:// URI."""
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
        """Number of steps of all phases together."""
        return self._opened.recipe.total_steps

    def status(self) -> "RunStatus":
        """Return what `maskfleet runs status` shows: progress, where it runs, interruptions, goodput."""
        import time

        from launcher.observe.inspect.status import read_status
        from launcher.runtime.run.outline import open_outline

        return read_status(open_outline(self.uri, self._opened.store), time.time())

    def checkpoints(self) -> list[CheckpointRow]:
        """Return the run's checkpoints, the newest first."""
        return checkpoint_rows(self._opened.store)

    def metrics(self) -> "pd.DataFrame":
        """Return the step records, one row a step, indexed by `step`. For a repeated step, the newest record counts.

        Every metric is a float64 column, NaN where a record has no number; infra/docs/records.md explains the names.

        Raises:
            MissingPackage: pandas is not installed.
        """
        pandas = import_optional("pandas", _PANDAS_PURPOSE)
        steps = read_history(self._opened.store).steps
        columns = {name: steps.column(name) for name in sorted(steps.fields - {"step"})}
        return pandas.DataFrame(columns, index=pandas.Index(steps.numbers.astype("int64"), name="step"))

    def evaluations(self) -> "pd.DataFrame":
        """Return the evaluations on held-out text, indexed by `step`, the number of steps done before.

        Raises:
            MissingPackage: pandas is not installed.
        """
        return _data_frame(read_history(self._opened.store).evaluations, "step")

    def events(self) -> "pd.DataFrame":
        """Return the run's events, indexed by `time` (UTC). Which columns have values depends on `kind`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        frame = _data_frame(read_history(self._opened.store).events, "time")
        frame.index = import_optional("pandas", _PANDAS_PURPOSE).to_datetime(frame.index, unit="s", utc=True)
        return frame

    def sample(self, step: int, row: int = 0) -> "Shown":
        """Return row `row` of the global batch of step `step`, past or future. `print` shows its text with the masks
        marked.

        Raises:
            RunError: the run has no step `step`, or the step has no row `row`.
            CorpusError: a corpus has changed since the run was created.
        """
        from launcher.observe.inspect.show import find_sample

        return find_sample(self._opened, step, row)

    def stream(self, rank: int = 0, world: int = 1, start: int = 0, stop: int | None = None) -> "StepDataset":
        """Return the training data of steps `start` to `stop` (None: the last) that rank `rank` of `world` gets, for
        another trainer.

        Raises:
            RunError: the run has no such steps, or there is no such rank.
        """
        from launcher.app.api.stream import StepDataset

        return StepDataset(self.uri, rank=rank, world=world, start=start, stop=stop)

    def module(self, step: int | None = None) -> "nn.Module":
        """Return the trained network, heads of the objective included, with the weights of the checkpoint of `step`.

        The weights are in fp32 on the CPU, and the module is in evaluation mode. Its encoder takes
        `encoder_core.batch.Batch`.

        Args:
            step: step of the checkpoint; None: the newest good one.

        Raises:
            RunError: there is no checkpoint of `step`.
            CheckpointError: the checkpoint is damaged.
            TokenizerError: the run's tokenizer cannot be read.
        """
        from launcher.after.diagnose.states import open_checkpoint

        return open_checkpoint(self._opened, step).objective

    def transformers_model(self, step: int | None = None, part: str | None = None) -> "PreTrainedModel":
        """Return a checkpoint's weights as a model of the `transformers` class that an export of the run names.

        Args:
            step: step of the checkpoint; None: the newest good one.
            part: name of one network, where a run has a generator and a discriminator. None: the discriminator, or
                the only network.

        Raises:
            MissingPackage: transformers is not installed.
            RunError: there is no checkpoint of `step`, or the run has no `part`.
            ModelError: transformers has no class for the model.
            CheckpointError: the checkpoint is damaged.
            TokenizerError: the run's tokenizer cannot be read.
        """
        from launcher.app.api.models import load_transformers_model

        return load_transformers_model(self._opened, step, part)


def _data_frame(records: tuple[Record, ...], index: str) -> "pd.DataFrame":
    pandas = import_optional("pandas", _PANDAS_PURPOSE)
    frame = pandas.DataFrame.from_records(list(records))
    return frame.set_index(index) if len(records) else pandas.DataFrame(index=pandas.Index([], name=index))
