"""Arguments and callback of transformers' Trainer, shared by fine-tuning and the training of embeddings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from launcher.errors import EVALUATE_EXTRA, import_optional
from launcher.progress import Work


def training_arguments(kind: Any, settings: Any, *, seed: int, scratch: Path, **own: Any) -> Any:
    """Return the Trainer's arguments, an object of transformers' or sentence-transformers' class `kind`, and disable
    cuDNN's attention in this process.

    Args:
        settings: `FinetuneSettings` or `EmbedTrainingSettings`.
        scratch: temporary folder, for weights that the Trainer saves.
        own: arguments that only one of the two trainings has.
    """
    import_optional("accelerate", "training", EVALUATE_EXTRA)
    # Given a mask on a Hopper GPU, its gradients may be NaN (pytorch#196678), and torch prefers it there.
    torch.backends.cuda.enable_cudnn_sdp(False)
    arguments = kind(
        output_dir=str(scratch),
        num_train_epochs=settings.epochs,
        learning_rate=settings.lr,
        lr_scheduler_type="linear",
        warmup_steps=settings.warmup,  # transformers reads a number below 1 as a share of all steps
        weight_decay=settings.weight_decay,
        bf16=settings.precision == "bf16",
        seed=seed,
        data_seed=seed,
        logging_nan_inf_filter=False,
        save_only_model=True,
        save_total_limit=1,
        greater_is_better=True,
        report_to="none",
        disable_tqdm=True,
        **own,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # else the Trainer multiplies the batch by the number of GPUs
    return arguments


def training_callback(progress: Work, show_figures: Callable[[Any, Mapping[str, float]], None]) -> Any:
    """Return the callback that shows progress, and passes the Trainer's state and logged values to `show_figures`."""
    transformers = import_optional("transformers", "training", EVALUATE_EXTRA)

    class Progress(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            progress.set_done(state.global_step, state.max_steps)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            show_figures(state, logs or {})

    return Progress()
