"""The Hub's process as it is when something goes badly wrong: the first publish ends it, with the token in its last words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from colabtrain.runtime import hub_worker
from colabtrain.runtime.hub import Hub

DIED = "COLABTRAIN_TEST_DIED"  # a file that is there once it has


class Dying(BaseException):
    pass


def main() -> None:
    do, died = hub_worker._do, Path(os.environ[DIED])

    def dying(hub: Hub, job: str, **given: Any) -> Any:
        if job == "publish" and not died.exists():
            died.touch()
            raise Dying(f"Authorization: Bearer {hub._api.token}")
        return do(hub, job, **given)

    hub_worker._do = dying
    hub_worker.main()


if __name__ == "__main__":
    main()
