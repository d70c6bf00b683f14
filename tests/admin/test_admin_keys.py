"""Who may administer a group: keys in its settings, files with keys, `--sign-with`; in memory and by the commands."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import marshal_py
from marshal_py.admin.group import Group
from marshal_py.admin.plans.change import DeletionPlan
from marshal_py.admin.plans.operation import Author, GroupContext, sealed
from marshal_py.admin.views.pause_history import PauseHistory
from marshal_py.client.values import options
from marshal_py.errors import (
    AdminBusy,
    AdminFailed,
    GroupOpaque,
    InvalidOption,
    KeyNeeded,
    MembersAlive,
    UnsupportedPlatform,
)
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.member import group_settings
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.records import GroupConfig, Leave, Record, ReleaseGroup
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from marshal_sim.cluster.hostile import key_of
from tests.support.differential_log import GROUP, INCARNATION, DifferentialLog


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic("orders", 2)
    return made


@pytest.fixture
def marshal(broker: MemoryBroker) -> Iterator[marshal_py.Marshal]:
    with marshal_py.connect(MemoryTransport(broker)) as made:
        made.create_group(GROUP)
        yield made


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{name}.key" for name in ("alice", "bob")]
    for file in found:
        options.generate_key(file)
    return found


def signs(marshal: marshal_py.Marshal, file: Path) -> Group:
    return Group(marshal.transport, GROUP, marshal.coordination_topic, key=options.read_key(file))


def public(file: Path) -> str:
    return options.read_key(file).public.hex()


def test_only_holders_of_a_key_administer(marshal: marshal_py.Marshal, files: list[Path]) -> None:
    """F11.1, F11.2: from the first key on, and until the last one is gone; consumers do not notice."""
    alice, bob = files
    plain = marshal.group(GROUP)
    assert plain.info().admin_keys == ()
    plain.set_config(admin_keys=[public(alice)], reason="operators alone")
    signed = signs(marshal, alice)
    with marshal.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0) as consumer:
        for nobody in (plain, signs(marshal, bob)):
            with pytest.raises(KeyNeeded, match=f"takes changes only from its admin keys \\({public(alice)[:16]}\\)"):
                nobody.pause(60)
        with pytest.raises(AdminFailed, match=r"no position .* moved: .* takes changes only from its admin keys"):
            plain.set_position("orders", 0)
        assert plain.info().pause is None
        token = signed.pause(60, "a test").token
        assert consumer.info().waiting_for.endswith(f"marshal resume {GROUP} --take-over --sign-with FILE")
        with pytest.raises(AdminBusy, match=f"marshal resume {GROUP} --sign-with FILE"):
            signed.pause(60)
        assert signed.set_position("orders", 0, token=token).offset > token
        signed.resume(token=token)
        signed.set_config(policy="greedy")
        assert plain.info().admin_keys == (public(alice),), "other settings leave the keys alone"
        assert consumer.info().closed is False
    with pytest.raises(KeyNeeded):
        plain.delete()
    signed.set_config(admin_keys=[public(bob)])
    with pytest.raises(KeyNeeded, match=f"{public(alice)[:16]} is none of them"):
        signed.pause(60)
    other = signs(marshal, bob)
    with marshal.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0), pytest.raises(MembersAlive):
        other.delete()
    assert other.delete()
    assert other.delete() is False
    with pytest.raises(KeyNeeded):
        marshal.create_group(GROUP)
    assert plain.info().admin_keys == (public(bob),), "also a deleted group has them"
    other.create()
    assert plain.info().admin_keys == (public(bob),), "until its holder says otherwise"


def test_a_connection_signs_what_it_changes(
    broker: MemoryBroker, marshal: marshal_py.Marshal, files: list[Path]
) -> None:
    """F11.2: by `connect(sign_with=...)`, every verb that changes a group."""
    marshal.group(GROUP).set_config(admin_keys=[public(files[0])])
    with pytest.raises(InvalidOption, match="a file of `marshal keys FILE --generate`"):
        marshal_py.connect(MemoryTransport(broker), sign_with=files[0].parent)
    with marshal_py.connect(MemoryTransport(broker), sign_with=files[0]) as operator:
        with operator.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0) as consumer:
            operator.group(GROUP).set_config(admin_keys=[*map(public, files)])
            token = operator.group(GROUP).pause(60).token
            operator.group(GROUP).resume(token=token)
            assert consumer.info().closed is False, "it has read the new key"
        operator.update_group(GROUP, marshal_py.GroupConfig(policy="greedy"))
        with pytest.raises(KeyNeeded):
            marshal.update_group(GROUP, marshal_py.GroupConfig(policy="balanced"))
        assert operator.delete_group(GROUP)


def test_keys_that_are_exchanged_in_a_pause(marshal: marshal_py.Marshal, files: list[Path]) -> None:
    """F11.2: what the old key began goes on, and only a holder of the new one moves and ends it."""
    marshal.group(GROUP).set_config(admin_keys=[public(files[0])])
    alice, bob = (signs(marshal, file) for file in files)
    with marshal.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0):
        token = alice.pause(60).token
    alice.set_config(admin_keys=[public(files[1])])
    for refused in (lambda: alice.set_position("orders", 0, token=token), lambda: alice.resume(token=token)):
        with pytest.raises((KeyNeeded, AdminFailed), match="takes changes only from its admin keys"):
            refused()
    assert bob.info().pause is not None
    assert bob.set_position("orders", 0, token=token).offset > token
    bob.resume(token=token)
    assert bob.info().pause is None


def test_the_last_key_that_goes_opens_the_group(marshal: marshal_py.Marshal, files: list[Path]) -> None:
    marshal.group(GROUP).set_config(admin_keys=[*map(public, files)])
    marshal.create_group(GROUP)
    signs(marshal, files[0]).set_config(admin_keys=[])
    assert marshal.group(GROUP).pause(60).token > 0


def test_consumers_that_cannot_verify_are_not_stopped_unawares(
    marshal: marshal_py.Marshal, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11.5: the first keys wait until all can read them; one that comes later ends by name."""
    monkeypatch.setattr(group_settings, "SIGNED_VERSION", 3)  # as if the consumers could read version 2 alone
    with marshal.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0) as consumer:
        name = consumer.info().client_id
        with pytest.raises(InvalidOption, match=f"{name}.* would stop: install marshal_py\\[keys\\]"):
            marshal.group(GROUP).set_config(admin_keys=[key_of(1).public.hex()])
    with marshal.consumer("without-settings", ["orders"], heartbeat_interval_s=1.0) as consumer:
        name = consumer.info().client_id
        settings = marshal_py.GroupConfig(admin_keys=[key_of(1).public.hex()])
        with pytest.raises(InvalidOption, match=f"{name}.* would stop: install marshal_py\\[keys\\]"):
            marshal.consumer("without-settings", ["orders"], group_config=settings).next(30)
    monkeypatch.undo()
    marshal.group(GROUP).set_config(admin_keys=[key_of(1).public.hex()])
    monkeypatch.setattr(rationalizer, "READS_VERSION", 1)
    with (
        marshal_py.connect(MemoryTransport(broker)) as old,
        pytest.raises(GroupOpaque, match=r"marshal_py\[keys\]"),
        old.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0) as consumer,
    ):
        consumer.next(30)
    monkeypatch.undo()
    broker.produce("orders", 0, b"one")
    with (
        marshal_py.connect(MemoryTransport(broker)) as new,
        new.consumer(GROUP, ["orders"], heartbeat_interval_s=1.0, start="earliest") as consumer,
    ):
        message = consumer.next(30)
        assert message is not None, "with the extra it goes on where the group is"
        assert message.value == b"one"


def test_a_file_keeps_its_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its owner alone, never replaced, and in no error."""
    file = tmp_path / "ops.key"
    found = options.generate_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert options.read_key(file).public.hex() == found
    with pytest.raises(InvalidOption, match="File exists"):
        options.generate_key(file)
    secret = file.read_text().splitlines()[1]
    (tmp_path / "cut.key").write_text(file.read_text()[:-40])
    for wrong in (tmp_path / "cut.key", tmp_path / "none.key", tmp_path):
        with pytest.raises(InvalidOption, match="a file of `marshal keys FILE --generate`") as refused:
            options.read_key(wrong)
        assert secret not in str(refused.value)
    for text in ("", "ab", "x" * 64, found + "00", 5):
        with pytest.raises(InvalidOption, match="64 hex digits"):
            options.check_settings({"admin_keys": [text]})
    with pytest.raises(InvalidOption, match="at most 16"):
        options.check_settings({"admin_keys": [found] * 17})
    monkeypatch.setattr(options, "VERIFIES", False)
    with pytest.raises(UnsupportedPlatform, match=r"pip install 'marshal_py\[keys\]'"):
        options.read_key(file)


class Tool:
    """A deletion without force, in a log whose group has a key."""

    def __init__(self) -> None:
        self.key, self.book = key_of(1), DifferentialLog()
        self.book.put(codec.encode(GroupConfig(-1, mode=1, admin_keys=(self.key.public,)), GROUP, INCARNATION))
        author = Author("ann", "ann", self.key)
        self.context = GroupContext(self.book.world, GROUP, PauseHistory(GROUP), author, Random(1).randbytes)
        self.plan, self.now_ms = DeletionPlan(self.context, force=False), 0

    def sends(self, kind: type[Record]) -> Record:
        self.now_ms += 1_000
        (record,) = [one for one in self.plan.tick(self.now).send if isinstance(one, kind)]
        return record

    def reads(self, record: Record) -> None:
        verdict = self.book.put(sealed(self.book.world, GROUP, record, self.key))
        self.context.pause_history.read(verdict)
        self.plan.receive(verdict, self.now)

    @property
    def now(self) -> Instant:
        return Instant(self.now_ms, self.now_ms, self.now_ms)


def test_a_signed_deletion_counts_in_its_pause_alone() -> None:
    """F11.4: a tool that dies leaves nothing that a copy could delete the group by later."""
    tool = Tool()
    pause = tool.sends(ReleaseGroup)
    assert isinstance(pause, ReleaseGroup)
    tool.reads(pause)
    value = sealed(tool.book.world, GROUP, tool.sends(GroupConfig), tool.key)  # and it dies
    session = tool.book.join()
    tool.book.must(ReleaseGroup(tool.book.group.pause_change, -1, 0, waited_ms=pause.duration_ms))
    assert tool.book.put(value).reason == "sessions"
    tool.book.must(Leave(session))
    assert tool.book.put(value).reason == "token"


def test_a_consumer_that_joins_prevents_a_deletion() -> None:
    """M11: as in a group without keys, although this one is paused."""
    tool = Tool()
    tool.reads(tool.sends(ReleaseGroup))
    tool.book.join()
    tool.reads(tool.sends(ReleaseGroup))
    tool.plan.tick(tool.now)
    assert isinstance(tool.plan.error, MembersAlive)
    assert not tool.book.group.paused
