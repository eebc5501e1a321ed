"""``task=remote``: environments of actors on other machines, or in other processes, as one simulator."""

from pql.envs.remote.env import Remote as Remote
