"""What each kind of job does."""

from threading import Event

from data_service.processes import locked
from launcher.observe.inspect.baselines import baselines
from launcher.runtime.run.record import Run

from .jobs import Job
from .measuring import measure_finetuned, measure_frozen
from .place import Place
from .pretraining import prepare, recipe_of, trained
from .vectors import train_vectors


def do(place: Place, job: Job, interrupted: Event) -> None:
    """All of it, or what is left of it.

    Raises KeyboardInterrupt: `interrupted` was set. Kinds of UserError: it cannot be done.
    """
    locks = place.root / "locks"
    locks.mkdir(exist_ok=True)
    with locked(locks / f"{job.family}-{job.seed}"):
        run = _pretrained(place, job, interrupted)
        match job.kind:
            case "run":
                measure_frozen(place, run)
                baselines(run)
                measure_finetuned(place, job.family, job.seed, run)
            case "vectors":
                train_vectors(place, job.family, job.seed, run, interrupted)


def _pretrained(place: Place, job: Job, interrupted: Event) -> Run:
    family = place.family(job.family)
    with locked(place.root / "locks" / place.vocabulary(family).name):
        prepare(place, family)
    return trained(recipe_of(place, job.family, job.seed), place.run(job.family, job.seed), interrupted)
