"""Official SDK: upload every loss of traced_losses.py; the test looks at what was sent."""

from __future__ import annotations

import tinker
from report import done, say
from traced_losses import LOSSES


def main() -> None:
    service = tinker.ServiceClient()
    for fn, ranks in LOSSES:
        handle = service.create_custom_loss(fn, ranks).result()
        say(fn.__name__, name=handle.name, loss_id=handle.loss_id, input_names=list(handle.input_names))


if __name__ == "__main__":
    main()
    done()
