"""Creates, changes, finds and deletes the groups of a coordination topic, or those that consume one data topic.

It finds groups by reading the log; what it changes is done by Group.
"""

from __future__ import annotations

from marshal_py.admin.group import Group
from marshal_py.client.values.group_config import GroupConfig
from marshal_py.errors import AlreadyExists, GroupMissing
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold.world import Group as GroupState
from marshal_py.protocol.wire.identity import check_id
from marshal_py.transport.ports import Transport


class Groups:
    """Works on the groups of one coordination topic. `data_topic`: "" or the topic that the groups must consume.

    A group that has not consumed anything yet belongs to every data topic.
    """

    def __init__(self, transport: Transport, coordination_topic: str, data_topic: str = "") -> None:
        self._transport, self._topic, self._data_topic = transport, coordination_topic, data_topic

    def create(self, name: str, config: GroupConfig, reason: str) -> Group:
        """Creates the group, or revives a deleted one; one that has these settings stays."""
        group = self._group(name)
        group.create(**config.named(), reason=reason)
        return group

    def update(self, name: str, config: GroupConfig, reason: str) -> Group:
        """Changes the settings that are not None. Raises what Group.set_config raises."""
        group = self.get(name)
        group.set_config(**config.named(), reason=reason)
        return group

    def create_or_update(self, name: str, config: GroupConfig, reason: str) -> Group:
        """Creates the group, or changes its settings if it exists. Writes nothing if it has them already."""
        known = self._state(name)
        if known is None or known.deleted:
            try:
                return self.create(name, config, reason)
            except AlreadyExists:
                pass  # somebody was faster
        elif config.is_part_of(known):
            return self.get(name)
        return self.update(name, config, reason)

    def get(self, name: str) -> Group:
        """Returns the operations on a group. Raises GroupMissing if it consumes other topics than `data_topic`.

        Without a `data_topic` nothing is read, and a group that does not exist shows at its first operation.
        """
        group = self._group(name)
        if self._data_topic:
            known = self._state(name)
            if known is not None and not self._belongs(known):
                there = ", ".join(sorted(known.topics))
                raise GroupMissing(name, f"has never consumed topic {self._data_topic!r}: it consumes {there}")
        return group

    def names(self) -> tuple[str, ...]:
        """Returns the sorted names of all groups that are not deleted."""
        with self._observer() as observer:
            observer.fold()
            found = [group for _, group in observer.groups() if not group.deleted]
        return tuple(group.name for group in found if not self._data_topic or self._data_topic in group.topics)

    def delete(self, name: str, force: bool, reason: str) -> bool:
        """Deletes the group and its positions in all topics. Returns False if it was deleted already."""
        return self.get(name).delete(force=force, reason=reason)

    def _group(self, name: str) -> Group:
        check_id("group", name)
        return Group(self._transport, name, self._topic)

    def _state(self, name: str) -> GroupState | None:
        with self._observer() as observer:
            observer.fold(name)
            return next((group for _, group in observer.groups() if group.name == name), None)

    def _belongs(self, group: GroupState) -> bool:
        return not group.topics or self._data_topic in group.topics

    def _observer(self) -> Observer:
        return Observer(self._transport, self._topic)
