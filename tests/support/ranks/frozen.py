"""Training with some parameters frozen, saved into a store and loaded from it; importable by name, for `run_ranks`."""

from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from checkpoints.attempt import Attempt
from checkpoints.commit import CommittedSave
from checkpoints.gloo_peers import GlooPeers
from checkpoints.load import CheckpointReader
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good
from data_service.store.open import open_store
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.zero_state import KINDS
from tests.support.ranks import small_training as small
from tests.support.ranks.fragments import pieces
from tests.support.ranks.small_training import Setting, Trace

STEPS = 2


@dataclass(frozen=True)
class Case:
    """A random third of the parameters frozen; how they are saved, and how loaded."""

    seed: int
    saved: Setting
    loaded: Setting

    @property
    def frozen(self) -> set[str]:
        draws = np.random.default_rng(self.seed)
        return {name for name, _ in small.Poisonable().named_parameters() if draws.random() < 0.35}


def train_and_save(rank: int, world: int, cases: list[Case], folder: str) -> list[Trace]:
    """Two steps from the same fresh weights, then a commit, each in a store of its own."""
    control, peers = RankGroup.join(), GlooPeers(dist.new_group(backend="gloo"))
    traces = []
    for case in cases:
        engine = _engine(small.fresh_model(), case, case.saved)
        steps = [small.step_of(engine, control, number) for number in range(STEPS)]
        store = open_store(f"{folder}/{case.seed}")
        saver = Saver(store, Attempt(store, 1), peers)
        saver.begin(STEPS, engine.fragments(), engine.shapes, {})
        assert isinstance(saver.commit(), CommittedSave)
        saver.close()
        traces.append(_trace(engine, [(loss, update.grad_norm, update.applied) for loss, update in steps]))
    return traces


def load(rank: int, world: int, cases: list[Case], folder: str) -> list[Trace]:
    """What ranks hold that have loaded it into a model of other fresh weights."""
    peers = GlooPeers(dist.new_group(backend="gloo"))
    traces = []
    for case in cases:
        engine = _engine(small.fresh_model(small.SEED + 1), case, case.loaded)
        store = open_store(f"{folder}/{case.seed}")
        good = find_newest_good(store, peers)
        assert good is not None
        with CheckpointReader(store, good.manifest) as reader:
            engine.restore(KINDS, reader.read)
        traces.append(_trace(engine, []))
    return traces


def _engine(model: small.Poisonable, case: Case, setting: Setting) -> Engine:
    for name, p in model.named_parameters():
        p.requires_grad_(name not in case.frozen)
    return small.engine_of(model, setting)


def _trace(engine: Engine, steps: list[tuple[float, float, bool]]) -> Trace:
    return Trace(steps, pieces(engine.fragments()), engine.shapes)
