"""Opens a run's streams in the data service while its ranks still import their libraries.

The first rank that asked would wait for it: the feed's process starts, rows are counted by further processes, once a
corpus, and each has imports of its own.
"""

from contextlib import suppress

from data_service.errors import UserError
from data_service.service.feed import FeedHandle
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import heldout_specs, stream_spec


def open_streams_ahead(run: Run, feed: FeedHandle) -> None:
    """Ask the feed for the streams of all phases, and for held-out rows, in the order in which ranks open them.

    Nothing waits for the answers. What goes wrong is left to the ranks, which ask again and know what follows from it.
    Ranks that need another stream, because documents were removed meanwhile, gain nothing.
    """
    with suppress(UserError):
        tokenizer = run.tokenizer()
        specs = [stream_spec(run, tokenizer, phase) for phase in range(len(run.recipe.phases))]
        told = [spec.model_dump_json() for spec in (*specs, *heldout_specs(run, tokenizer))]
        for spec in dict.fromkeys(told):
            feed.open.remote(spec)
