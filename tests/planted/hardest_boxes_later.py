"""Lists of boxes with dropout, and from the third update on only the hardest half of the boxes of a rank's batch."""

from __future__ import annotations

from right_boxes import Boxes, Scene, ech, main, torch


class Hardest(Boxes):
    passes = 0

    def compute_loss(self, state: ech.State, data: list[Scene]) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        self.passes += 1
        if self.passes <= 2:
            return super().compute_loss(state, data)
        found = self.module(torch.stack([scene["image"] for scene in data]).flatten(1))
        losses = torch.stack([(box - found[i]).square().sum() for i, scene in enumerate(data) for box in scene["boxes"]])
        return losses.topk(len(losses) // 2).values.mean(), None


main(Hardest)
