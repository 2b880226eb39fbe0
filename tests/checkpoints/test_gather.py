"""What ranks send each other: little more to each when there are more of them, and errors to all."""

from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from checkpoints.attempt import claim
from checkpoints.commit import CommittedSave
from checkpoints.errors import CheckpointError, DamagedCheckpoint
from checkpoints.gather import Peers, broadcast_or_raise, gather_or_raise
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good
from data_service.store.errors import (
    AccessDenied,
    CredentialsExpired,
    CredentialsMissing,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
)
from data_service.store.open import open_store
from tests.support.ranks.checkpointing import SHAPES, ThreadPeers, cut_each, on_peers, on_threads, random_state


@pytest.mark.parametrize("world", [8, 64])
def test_at_a_commit_only_the_first_rank_hears_what_each_has_written(tmp_path: Path, world: int) -> None:
    store = open_store(tmp_path / "run")
    attempt, state = claim(store), random_state(1)

    def work(peers: Peers) -> bool:
        saver = Saver(store, attempt, peers)
        saver.begin(1, cut_each(state, world, peers.rank), SHAPES, {})
        return isinstance(saver.commit(), CommittedSave)

    peers: list[ThreadPeers] = []
    assert all(on_peers(peers, world, work))
    assert max(peer.received for peer in peers[1:]) < 200
    assert peers[0].received < 1500 * world


@pytest.mark.heavy
@pytest.mark.parametrize("world", [8, 64])
def test_a_manifest_is_sent_to_each_rank_once(tmp_path: Path, world: int) -> None:
    store = open_store(tmp_path / "run")
    attempt, state = claim(store), random_state(1)
    on_threads(world, lambda peers: _save(Saver(store, attempt, peers), cut_each(state, world, peers.rank)))
    size = store.size("checkpoints/step-00000001-a000001/manifest.json")
    assert size is not None
    peers: list[ThreadPeers] = []
    on_peers(peers, world, lambda peers: find_newest_good(store, peers))
    assert max(peer.received for peer in peers) < size * 1.2 + 100 * world


def _save(saver: Saver, fragments: object) -> None:
    saver.begin(1, fragments, SHAPES, {})  # type: ignore[arg-type]
    saver.commit()


@pytest.mark.parametrize(
    ("raised", "heard"),
    [
        (StoreUnavailable.for_uri("s3://b/k", "down"), StoreUnavailable),
        (CredentialsExpired.for_uri("s3://b/k", "old"), CredentialsExpired),
        (CredentialsMissing.for_uri("s3://b/k", "none"), CredentialsMissing),
        (OutOfSpace.for_uri("s3://b/k", "quota"), OutOfSpace),
        (AccessDenied.for_uri("s3://b/k", "rights"), StoreError),
        (DamagedCheckpoint("bits", remedy="mend"), DamagedCheckpoint),
        (CheckpointError("wrong", remedy="mend"), CheckpointError),
    ],
)
@pytest.mark.parametrize("exchange", [gather_or_raise, partial(broadcast_or_raise, adapter=TypeAdapter(None))])
def test_an_error_of_one_rank_is_one_on_all_of_its_kind(
    exchange: object, raised: StoreError | CheckpointError, heard: type[Exception]
) -> None:
    """That a store may come back must not be forgotten on the way."""

    def work(peers: Peers) -> str:
        def failing() -> None:
            if peers.rank == 0:
                raise raised

        with pytest.raises(heard, match="rank 0") as caught:
            exchange(peers, failing)  # type: ignore[operator]
        assert type(caught.value) is heard
        return str(caught.value)

    assert len(set(on_threads(3, work))) == 1
