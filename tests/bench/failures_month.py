"""A month of a run on a cluster that has faults, by discrete events in simulated time.

What is decided, is decided by the code that decides in a run: `WorldSizeTracker` (how many ranks, on which nodes, when
to make room for more), `FailureHistory` (the failure policy) and `partners` (who keeps whose copy). Only what takes
time is arithmetic: steps, saves, copies, restarts.

Training passes through three stages: places are looked for, the ranks come together, the ranks train. A fault of a
node in use ends the second and the third.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from failures_cluster import (
    MONTH_S,
    SPARE_AGAIN_S,
    Fault,
    Layout,
    Machines,
    MemoryCopy,
    Outage,
    Seat,
    Segment,
    Way,
    noticed,
)

from launcher.runtime.cluster.operator_log import FailureHistory
from launcher.runtime.cluster.resources import Nodes, WorldSizeTracker
from launcher.runtime.policies.elastic import Sizing, count_places
from launcher.runtime.policies.failures import Failure, StopDecision

OPERATOR_S = 1800.0  # until a person has started a run again that the failure policy ended; a guess
_LOOK_S = 5.0  # between two questions whether there is room for more ranks


@dataclass(frozen=True)
class Setting:
    """A run on a cluster.

    Attributes:
        nodes, ranks_of_node: size of the cluster.
        sizing: the numbers of ranks that the run may have.
        microbatches: number of microbatches of a step.
        round: seconds of one microbatch.
        rest: seconds of a step besides its microbatches.
        blocked, behind: seconds of a save, as in `Saving`.
        hang: seconds until a hang is noticed.
    """

    nodes: int
    ranks_of_node: int
    sizing: Sizing
    microbatches: int
    round: float
    rest: float
    blocked: float
    behind: float
    hang: float

    def step(self, world: int) -> float:
        """Return the seconds of a step of `world` ranks."""
        return -(-self.microbatches // world) * self.round + self.rest

    @property
    def ranks(self) -> int:
        """As many ranks as the run may have here."""
        return min(self.sizing.most, self.nodes * self.ranks_of_node)

    @property
    def full(self) -> float:
        """Seconds of a step of as many ranks as the run may have here."""
        return self.step(self.ranks)


@dataclass
class Month:
    """What became of the seconds of a simulated month. `useful` and the values of `lost` add up to `wall`.

    Attributes:
        useful: seconds of work, at the speed of all ranks, that are in the model at the end.
        lost: seconds by cause: "repeated" steps, "restarting", "waiting" for machines, "saving", "copying",
            "fewer ranks", "operator" (the failure policy ended the run).
        restarts: number of starts of ranks after the first.
        stayed: restarts in which the survivors stayed.
        from_store: restarts that repeat steps since a commit in the store.
        ended: how often the failure policy ended the run.
        excluded: number of nodes that the failure policy left out for good.
    """

    wall: float
    useful: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    stayed: int = 0
    from_store: int = 0
    ended: int = 0
    excluded: int = 0

    @property
    def goodput(self) -> float:
        return self.useful / self.wall

    def spend(self, cause: str, seconds: float) -> None:
        self.lost[cause] = self.lost.get(cause, 0.0) + seconds


def simulate(
    setting: Setting,
    way: Way,
    interval: float,
    faults: Sequence[Fault],
    outages: Sequence[Outage],
    wall: float = MONTH_S,
) -> Month:
    """Simulate `wall` seconds of a run that saves after every `interval` seconds of training."""
    return Simulation(setting, way, interval, faults, outages, wall).run()


class Simulation:
    """One simulated month. The arguments are those of `simulate`."""

    def __init__(
        self,
        setting: Setting,
        way: Way,
        interval: float,
        faults: Sequence[Fault],
        outages: Sequence[Outage],
        wall: float,
    ) -> None:
        self.setting, self.way, self.interval, self.outages = setting, way, interval, outages
        self.now, self.month = 0.0, Month(wall)
        each = {name: amount * setting.ranks_of_node for name, amount in setting.sizing.each.items()}
        self.machines = Machines(setting.nodes, each, faults)
        self.world = self.tracker(None)
        self.deaths = FailureHistory(())
        self.layout = Layout((), setting.ranks_of_node, 0)
        self.work = self.committed = 0.0
        self.copy: MemoryCopy | None = None
        self.hit: set[Seat] = set()  # seats whose processes the last event took away
        self.lost: set[int] = set()  # nodes that were lost since ranks last trained
        self.new = False  # whether a node takes part that did not before, or was lost meanwhile
        self.stays = False  # whether the survivors of the last group are there
        self.spare = True  # whether a spare process is there for each process that died
        self.spares: dict[int, list[float]] = {}  # times from which a node has its spare processes again

    def run(self) -> Month:
        while self.now < self.month.wall and self.gather():
            if self.come_together():
                self.train()
        self.month.useful = self.work
        self.month.restarts -= 1  # the first start
        return self.month

    def tracker(self, last: int | None) -> WorldSizeTracker:
        """Return what a command begins with. `last`: number of ranks that wrote the newest checkpoint."""
        return WorldSizeTracker(self.setting.sizing, last, clock=lambda: self.now)

    def next_event(self) -> float:
        return max(self.now, min(self.machines.next_event(), self.month.wall))

    def pass_to(self, until: float, cause: str) -> None:
        """Let time pass until `until`, or the end of the month."""
        until = min(until, self.month.wall)
        self.month.spend(cause, until - self.now)
        self.now = until

    def happen(self) -> Fault | None:
        """Let happen what is due. Return the fault that hit ranks in use, if one did; nodes in use that have notice
        stay until they are released."""
        fault, self.hit = self.machines.happen(self.now), set()
        if fault is None:
            return None
        standing = self.machines.there.intersection(fault.nodes)
        seats = {seat for node in standing for seat in self.layout.on(node)}
        if fault.kind in ("rank", "hang"):
            seats &= {(fault.nodes[0], fault.place)}
        elif fault.kind != "notice" or not seats:
            self.take_away(standing)
        if fault.kind != "notice":
            self.hit = seats
        return fault if seats else None

    def take_away(self, nodes: Iterable[int]) -> None:
        """Let nodes go, with what is in their memory."""
        self.lost.update(nodes)
        self.machines.release(nodes, self.now)
        if self.copy is not None:
            self.copy.gone.update(nodes)

    def there(self, blamed: frozenset[str] = frozenset()) -> Nodes:
        """Return the cluster as the policies see it, with an entry for each node that is excluded or `blamed`."""
        return self.machines.listing(int(node) for node in blamed | self.world.without)

    def gather(self) -> bool:
        """Wait until ranks may start, and place them. Return False at the end of the month."""
        asked = self.now
        while self.now < self.month.wall:
            self.catch_up()
            count = self.ask()
            if count is not None:
                self.place(count)
                return True
            patience = asked + self.setting.sizing.wait
            self.pass_to(min(self.next_event(), patience if patience > self.now else inf), "waiting")
        return False

    def ask(self) -> int | None:
        """Return how many ranks may start now, as the driver decides; None: not yet."""
        return self.world.ranks_to_start(self.there())

    def enter(self) -> None:
        """Let the placed ranks begin to train."""
        self.world.record_world_size(self.layout.count)
        self.deaths.note_resume(self.steps(self.work))

    def has_room(self) -> bool:
        """Return whether the ranks should end so that more can start, as the driver decides. It also notes since
        when there are so many places, so it is asked whenever something has happened."""
        return self.world.should_grow(self.there())

    def goes_on(self, failure: Failure) -> bool:
        """Follow the failure policy. Return whether it lets the run go on."""
        self.deaths.add(failure)
        decision = self.deaths.decide(node_count=len(self.machines.there))
        if isinstance(decision, StopDecision):
            return False
        before = len(self.world.without)
        self.world.exclude_nodes(self.there(decision.without), decision.without)
        self.month.excluded += len(self.world.without) - before
        return True

    def catch_up(self) -> None:
        """Let happen what is due, while no rank trains."""
        while self.now < self.month.wall and self.next_event() <= self.now:
            fault = self.happen()
            if fault is not None and fault.kind == "notice":
                self.take_away(fault.nodes)

    def place(self, count: int) -> None:
        """Place ranks on the nodes of the last group first, then on others."""
        good = self.machines.there - {int(node) for node in self.world.without}
        before, needed = set(self.layout.nodes), -(-count // self.setting.ranks_of_node)
        again = sorted(good & before)[:needed]
        others = sorted(good - before)[: needed - len(again)]
        self.new = bool(before and (others or self.lost.intersection(again)))
        self.layout = Layout(tuple(sorted(again + others)), self.setting.ranks_of_node, count)

    def come_together(self) -> bool:
        """Start the ranks. Return whether they train: no fault came meanwhile. The attempt is claimed in the store, so
        every start waits until it answers."""
        stays = self.stays and self.way.stay is not None
        copy = self.copy if self.copy is not None and self.copy.whole() else None
        recalled = copy is not None and copy.work >= self.committed
        self.count_restart(stays, recalled)
        self.go_back(copy.work if copy is not None and recalled else self.committed)
        until = self.answered(self.now + self.start_seconds(stays))
        until += self.way.recall if recalled else self.way.load if self.committed else 0.0
        while self.now < min(until, self.month.wall):
            self.pass_to(min(until, self.next_event()), "restarting")
            fault = self.happen()
            if fault is not None and fault.kind == "notice":
                self.take_away(fault.nodes)
                return False
            if fault is not None:
                self.die(fault, worked=False)
                return False
        self.lost, self.spare = set(), True
        self.enter()
        return self.now < self.month.wall

    def start_seconds(self, stays: bool) -> float:
        """Return the seconds until the ranks are together, the state apart."""
        cold = self.way.cold if self.new else 0.0
        if not stays or self.way.stay is None:
            return self.way.anew + cold
        return self.way.stay + (self.way.process + cold if self.new or not self.spare else 0.0)

    def count_restart(self, stays: bool, recalled: bool) -> None:
        self.month.restarts += 1
        self.month.stayed += stays
        self.month.from_store += not recalled and self.work > self.committed

    def go_back(self, work: float) -> None:
        self.month.spend("repeated", self.work - work)
        self.work = work

    def answered(self, at: float) -> float:
        """Return the first time from `at` at which the store answers."""
        return next((outage.end for outage in self.outages if outage.begin <= at < outage.end), at)

    def train(self) -> None:
        """Train until a fault, a notice, the end of the month, or until more ranks can take part."""
        step = self.setting.step(self.layout.count)
        copies = self.way.copies
        share = 1.0 if copies is None else copies.every * step / (copies.every * step + copies.stall)
        speed = self.setting.full / step * share
        segment = Segment(self.now, self.work, speed, self.interval, self.setting.blocked)
        fault, grows, look = None, self.has_room(), self.next_look(segment)
        while fault is None and not grows and self.now < self.month.wall:
            self.now = min(self.next_event(), look)
            fault = self.happen()
            grows = fault is None and self.has_room()
            look = self.next_look(segment)
        self.keep(segment, step)
        self.account(segment, step, share)
        if grows or (fault is not None and fault.kind == "notice"):
            self.pause(fault)
        elif fault is not None:
            self.die(fault, worked=self.now - segment.begin > step)

    def next_look(self, segment: Segment) -> float:
        """Return when to ask whether the ranks should make room for more; infinite while there is no place for more."""
        sizing = self.setting.sizing
        if self.layout.count >= sizing.most:
            return inf
        if count_places(self.there(), sizing.place, self.world.without) <= self.layout.count:
            return inf
        return max(self.now + _LOOK_S, segment.begin + sizing.grow, self.machines.changed + sizing.wait)

    def keep(self, segment: Segment, step: float) -> None:
        """Note the newest commit and the newest complete copy of the time until now."""
        free, number = segment.begin, 1
        while (saved := segment.saved(number))[0] <= self.now:
            if saved[0] >= free:  # else the save before is not committed yet
                free = self.uploaded(saved[0])
                if free <= self.now:
                    self.committed = max(self.committed, saved[1])
            number += 1
        copies = self.way.copies
        if copies is None:
            return
        each = copies.every * step + copies.stall
        done = int((segment.trained(self.now) - copies.transfer) / each)
        if done > 0:
            gone = {node for node, _ in self.hit} - self.machines.there
            self.copy = MemoryCopy(segment.work + segment.speed * done * each, self.layout, gone)

    def uploaded(self, begin: float) -> float:
        """Return when an upload that begins at `begin` is over. What the store's outage breaks begins anew."""
        begin = self.answered(begin)
        end = begin + self.setting.behind
        broken = next((outage for outage in self.outages if begin < outage.begin < end), None)
        return end if broken is None else self.uploaded(broken.end)

    def account(self, segment: Segment, step: float, share: float) -> None:
        """Add up what became of a segment's time."""
        trained = segment.trained(self.now)
        self.month.spend("saving", self.now - segment.begin - trained)
        self.month.spend("copying", trained * (1 - share))
        self.month.spend("fewer ranks", trained * share * (1 - self.setting.full / step))
        self.work = segment.done(self.now)

    def pause(self, notice: Fault | None) -> None:
        """End the ranks in good order: they hand the state over in memory, or else save it. A node that had notice
        leaves afterwards.
        """
        self.stays, copies = True, self.way.copies
        if copies is not None:
            self.pass_to(self.now + copies.stall + copies.transfer, "copying")
            self.copy = MemoryCopy(self.work, self.layout)
        else:
            self.pass_to(self.uploaded(self.now + self.setting.blocked), "saving")
            self.committed = self.work
        if notice is not None:
            self.take_away(notice.nodes)

    def die(self, fault: Fault, *, worked: bool) -> None:
        """Notice a fault, and follow the failure policy. A hang leaves no survivors, because all ranks are killed."""
        self.stays = fault.kind != "hang"
        if fault.kind == "rank":
            self.spare = self.takes_spare(fault.nodes[0]) and self.spare
        self.pass_to(self.now + noticed(fault.kind, self.setting.hang, self.setting.ranks), "restarting")
        failure = Failure(
            time=self.now,
            step=self.steps(self.work),
            committed=self.deaths.committed,
            worked=worked,
            node=str(fault.nodes[0]) if len(fault.nodes) == 1 else None,
            error=None,
            kind="silent",
        )
        if not self.goes_on(failure):
            self.month.ended, self.stays = self.month.ended + 1, False
            self.pass_to(self.now + OPERATOR_S, "operator")
            self.world = self.tracker(self.layout.count)

    def takes_spare(self, node: int) -> bool:
        """Return whether the node has a spare process, and take it."""
        ready = self.spares.setdefault(node, [0.0] * self.way.spares)
        free = next((index for index, since in enumerate(ready) if since <= self.now), None)
        if free is not None:
            ready[free] = self.now + SPARE_AGAIN_S
        return free is not None

    def steps(self, work: float) -> int:
        return int(work / self.setting.full)
