"""Changes with which a plan tries what would make a program fit: ``torchdevice plan --try``.

A change is made where the program hands its model over: to transformers' ``Trainer``, or to
``Accelerator.prepare``. The program is planned with it, in a process of its own, so that nothing is
guessed. ``applied`` is how a change that found no such place is told from one that saves nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from torchdevice.kernel.bindings import later
from torchdevice.kernel.context import Context
from torchdevice.kernel.patching import Patch, replaced_function
from torchdevice.plan import model_changes
from torchdevice.plan.change_words import Change
from torchdevice.plan.eight_bits import EightBitAdam, EightBitAdamW, keep_whole

applied: set[str] = set()
"""The changes that have been made to a model in this process."""


def missing(change: Change) -> list[str]:
    """Return the names of a change for which the program had no place."""
    made = applied | ({"8-bit"} if EightBitAdamW.used else set())
    return [name for name in change.names if name not in made]


def install(change: Change) -> None:
    """Make a change in this process where the program uses a Trainer or an Accelerator, and
    AdamW.
    """
    if "8-bit" in change.names:
        _shrink_optimizers()
    later("transformers.trainer")(functools.partial(_patches_of_trainer, change))
    later("accelerate.accelerator")(functools.partial(_patches_of_accelerator, change))
    if change.ranks is not None:
        later("transformers.training_args")(_patches_of_arguments)


def _shrink_optimizers() -> None:
    """Put optimizers with states of 8 bits in the place of torch's, for the rest of the process."""
    for made in (EightBitAdamW, EightBitAdam):
        name = made.__name__.removeprefix("EightBit")
        for owner in (torch.optim, sys.modules[f"torch.optim.{name.lower()}"]):
            setattr(owner, name, made)


# ---- the model -----------------------------------------------------------------------------------


def _changed(model: Any, change: Change) -> Any:
    """Return a model with adapters and checkpoints, as far as the change has them.

    Raises:
        SystemExit: PEFT is not installed.
    """
    if "lora" in change.names:
        without = SystemExit(
            "torchdevice: the change 'lora' needs PEFT. Install it by 'pip install peft'."
        )
        model = model_changes.with_adapters(model, without)
        applied.add("lora")
    if "checkpointing" in change.names and model_changes.checkpoint(model):
        applied.add("checkpointing")
        if hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
    if "8-bit" in change.names:
        keep_whole(each.weight for each in model.modules() if isinstance(each, torch.nn.Embedding))
    return model


# ---- where programs hand it over -----------------------------------------------------------------


def _patches_of_trainer(change: Change, module: ModuleType) -> list[Patch]:
    def begin(
        context: Context, original: Any, self: Any, model: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if model is not None:
            model = _changed(model, change)
        elif kwargs.get("model_init") is not None:
            make = kwargs["model_init"]
            kwargs["model_init"] = lambda *given: _changed(make(*given), change)
        result = original(self, model, *args, **kwargs)
        if "checkpointing" in applied:
            self.args.gradient_checkpointing = True
        if change.ranks is not None and self.is_fsdp_enabled:
            applied.add("fsdp")
        return result

    return [replaced_function(module.Trainer, "__init__", begin)]  # type: ignore[attr-defined]


def _patches_of_arguments(module: ModuleType) -> list[Patch]:
    def begin(context: Context, original: Any, self: Any) -> Any:
        self.fsdp = self.fsdp or True
        return original(self)

    return [replaced_function(module.TrainingArguments, "__post_init__", begin)]  # type: ignore[attr-defined]


def _patches_of_accelerator(change: Change, module: ModuleType) -> list[Patch]:
    def begin(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if change.ranks is not None and not args and kwargs.get("fsdp_plugin") is None:
            plugin = module.FullyShardedDataParallelPlugin  # type: ignore[attr-defined]
            wrapped = {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
            kwargs["fsdp_plugin"] = plugin(fsdp_version=2, **wrapped)
            applied.add("fsdp")
        return original(self, *args, **kwargs)

    def prepare(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # The Trainer prepares a model that has been changed.
        if applied.isdisjoint({"lora", "checkpointing"}):
            args = tuple(_all_changed(args, change))
        return original(self, *args, **kwargs)

    owner = module.Accelerator  # type: ignore[attr-defined]
    return [
        replaced_function(owner, "__init__", begin),
        replaced_function(owner, "prepare", prepare),
    ]


def _all_changed(given: Sequence[Any], change: Change) -> Iterator[Any]:
    """Yield what ``prepare`` is given, with changed models, and with optimizers of what is still
    trained.
    """
    models = {
        id(each): _changed(each, change) for each in given if isinstance(each, torch.nn.Module)
    }
    for each in given:
        if isinstance(each, torch.optim.Optimizer) and "lora" in applied:
            _train_only(each, (part for model in models.values() for part in model.parameters()))
        yield models.get(id(each), each)


def _train_only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let an optimizer update those parameters that are trained, in its first group."""
    first = optimizer.param_groups[0]
    first["params"] = [each for each in parameters if each.requires_grad]
    del optimizer.param_groups[1:]
