"""Federated fine-tuning: LoRA adapters, aggregated as what they mean. docs/lora.md explains it.

    new = fastagg.lora.aggregate(global_adapter, client_adapters, sizes, method="fedawa")
    peft.set_peft_model_state_dict(model, new)
    new.weights, new.truncation

The adapters are state dicts by PEFT's names, or the folders that PEFT saves.
"""

from fastagg._engine.adapters.access import AdapterResult
from fastagg._engine.adapters.round import Adapter, aggregate, load, save

__all__ = ["Adapter", "AdapterResult", "aggregate", "load", "save"]
