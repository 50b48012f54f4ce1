"""Gives builds the address of their repository; no file contains its name."""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """The metadata ``urls``, in a workflow of GitHub; nothing elsewhere."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses."""
        server = os.environ.get("GITHUB_SERVER_URL")
        repository = os.environ.get("GITHUB_REPOSITORY")
        if server and repository:
            address = f"{server}/{repository}"
            metadata["urls"] = {
                "Source": address,
                "Issues": f"{address}/issues",
                "Changelog": f"{address}/blob/main/CHANGELOG.md",
            }
