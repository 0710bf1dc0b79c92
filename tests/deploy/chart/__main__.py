"""`python -m tests.deploy.chart` regenerates k8s/chart."""

from __future__ import annotations

import shutil

from tests.deploy.chart.contents import CHART, links, texts


def main() -> None:
    shutil.rmtree(CHART, ignore_errors=True)
    for name, text in texts().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in links().items():
        path = CHART / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


if __name__ == "__main__":
    main()
