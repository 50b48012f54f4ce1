"""Changes with which a plan tries what would make a program fit: ``torchdevice plan --try``.

A change is made where the program hands its model over: to transformers' ``Trainer``, or to
``Accelerator.prepare``. The program is planned with it, in a process of its own, so that nothing is
guessed. The context of the plan holds the change (:class:`Changed`), and what has been made of it:
so a change that found no such place is told from one that saves nothing. The functions here are put
in place in every scope, and change nothing in one whose context holds no change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torchdevice.kernel.bindings import replaces
from torchdevice.kernel.context import Context
from torchdevice.plan import eight_bits, model_changes
from torchdevice.plan.change_words import Change


class Changed:
    """A plan's changes of its program.

    Args:
        change: The change.

    Attributes:
        made: The names of the change that have found their place.
        whole: The parameters whose states stay float32. It holds none of them, so the number of one
            that is freed means nothing.
    """

    def __init__(self, change: Change):
        self.change = change
        self.made: set[str] = set()
        self.whole: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @property
    def missing(self) -> list[str]:
        """The names of the change for which the program has had no place."""
        return [name for name in self.change.names if name not in self.made]

    def model(self, model: Any) -> Any:
        """Return a model with adapters and checkpoints, as far as the change has them.

        Raises:
            SystemExit: PEFT is not installed.
        """
        names = self.change.names
        if "lora" in names:
            if not model_changes.has_peft():
                raise SystemExit(
                    "torchdevice: the change 'lora' needs PEFT. Install it by 'pip install peft'."
                )
            model = model_changes.with_adapters(model)
            self.made.add("lora")
        if "checkpointing" in names and model_changes.checkpoint(model):
            self.made.add("checkpointing")
            if hasattr(model, "enable_input_require_grads"):
                model.enable_input_require_grads()
        if "8-bit" in names:
            for each in model.modules():
                if isinstance(each, torch.nn.Embedding):
                    self.whole[each.weight] = True
        return model


def install(context: Context, change: Change) -> Changed:
    """Make a change in a context from now on, where its program uses a Trainer or an Accelerator,
    and AdamW.
    """
    found = context.settings[Changed] = Changed(change)
    return found


@replaces(torch.optim.Adam, "__init__")
def _make_adam(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """``Adam.__init__``, which AdamW calls too."""
    original(self, *args, **kwargs)
    changed: Changed | None = context.settings.get(Changed)
    if (
        changed is not None
        and "8-bit" in changed.change.names
        and eight_bits.shrink(self, changed.whole)
    ):
        changed.made.add("8-bit")


# ---- where programs hand their models over -------------------------------------------------------


@replaces("transformers.trainer:Trainer", "__init__")
def _make_trainer(
    context: Context, original: Any, self: Any, model: Any = None, *args: Any, **kwargs: Any
) -> None:
    changed: Changed | None = context.settings.get(Changed)
    if changed is None:
        return original(self, model, *args, **kwargs)
    if model is not None:
        model = changed.model(model)
    elif kwargs.get("model_init") is not None:
        make = kwargs["model_init"]
        kwargs["model_init"] = lambda *given: changed.model(make(*given))
    original(self, model, *args, **kwargs)
    if "checkpointing" in changed.made:
        self.args.gradient_checkpointing = True
    if changed.change.ranks is not None and self.is_fsdp_enabled:
        changed.made.add("fsdp")


@replaces("transformers.training_args:TrainingArguments", "__post_init__")
def _check_arguments(context: Context, original: Any, self: Any) -> None:
    changed: Changed | None = context.settings.get(Changed)
    if changed is not None and changed.change.ranks is not None:
        self.fsdp = self.fsdp or True
    original(self)


_ACCELERATOR = "accelerate.accelerator"


@replaces(f"{_ACCELERATOR}:Accelerator", "__init__")
def _make_accelerator(
    context: Context, original: Any, self: Any, *args: Any, **kwargs: Any
) -> None:
    changed: Changed | None = context.settings.get(Changed)
    has_plugin = args or kwargs.get("fsdp_plugin") is not None
    if changed is not None and changed.change.ranks is not None and not has_plugin:
        plugin = sys.modules[_ACCELERATOR].FullyShardedDataParallelPlugin
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
        kwargs["fsdp_plugin"] = plugin(fsdp_version=2, **wrapped)
        changed.made.add("fsdp")
    original(self, *args, **kwargs)


@replaces(f"{_ACCELERATOR}:Accelerator", "prepare")
def _prepare(context: Context, original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    changed: Changed | None = context.settings.get(Changed)
    # The Trainer prepares a model that has been changed.
    if changed is not None and changed.made.isdisjoint({"lora", "checkpointing"}):
        args = tuple(_all_changed(args, changed))
    return original(self, *args, **kwargs)


def _all_changed(given: Sequence[Any], changed: Changed) -> Iterator[Any]:
    """Yield what ``prepare`` is given, with changed models, and with optimizers of what is still
    trained.
    """
    models = {id(each): changed.model(each) for each in given if isinstance(each, torch.nn.Module)}
    for each in given:
        if isinstance(each, torch.optim.Optimizer) and "lora" in changed.made:
            _train_only(each, (part for model in models.values() for part in model.parameters()))
        yield models.get(id(each), each)


def _train_only(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let an optimizer update those parameters that are trained, in its first group."""
    first = optimizer.param_groups[0]
    first["params"] = [each for each in parameters if each.requires_grad]
    del optimizer.param_groups[1:]
