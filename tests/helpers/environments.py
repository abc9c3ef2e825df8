"""The topology that the environment variables of a launcher describe."""

import os
from collections.abc import Mapping
from unittest.mock import patch

from utils.launch.environment import Topology, read_topology


def variables_of(text: str) -> dict[str, str]:
    """The variables in a text such as "RANK=1 WORLD_SIZE=2"."""
    return dict(word.split("=") for word in text.split())


def topology_of(env: Mapping[str, str]) -> Topology:
    """The topology of a process with these environment variables and no others."""
    with patch.dict(os.environ, env, clear=True):
        return read_topology()
