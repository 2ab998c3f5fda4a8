"""Server-FT: FedAvg, and then the server trains the mean further on its own labelled data.

The baseline that FedLAW (Li et al., ICML 2023) holds learned weights against: what the same proxy data are worth if
they are simply trained on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from torch import Tensor, nn

from fastagg.extend import Cohort, Range, SetBy, register
from fastagg.methods.on_proxy import Loss, Objective, Student, Trained, pair


@register
class ServerFT(Trained):
    """FedAvg's model, fine-tuned by the server on proxy data.

    model      the nn.Module whose state dicts are aggregated; required, and never modified
    epochs     passes over the proxy data; many of them make the model forget what the clients know
    lr         learning rate of Adam (betas 0.5, 0.999)
    loss       function of (output, target) that returns a scalar tensor; default: cross-entropy
    progress   show a progress bar (if tqdm is installed); default: only if stderr is a terminal
    proxy      per round: (input, target) batches in any iterable that can be read again every epoch (a DataLoader, a
               list); an iterator is read once and its batches are kept

    The model trains in training mode: normalisation layers use the statistics of the proxy batch, and their running
    statistics, which start at the mean of the clients', follow. Integers are the maximum over the clients.

    The result has .weights (the data shares) and .losses (for each epoch, the mean over its batches).
    """

    name = "server_ft"
    paper = "a baseline of Li et al., ICML 2023"

    epochs: Annotated[int, Range(1)] = 2
    loss: Annotated[Loss | None, SetBy("loss")] = None

    def check_options(self) -> None:
        super().check_options()
        if self.loss is not None and not callable(self.loss):
            raise ValueError(f"server_ft: loss={self.loss!r}; expected a function of (output, target)")

    def objective(self, cohort: Cohort, student: Student, proxy: Iterable) -> Objective:
        criterion = self.loss or nn.functional.cross_entropy

        def loss(number: int, batch: Any) -> Tensor:
            given, target = pair(batch)
            return criterion(student(given), student.on_device(target))

        return loss
