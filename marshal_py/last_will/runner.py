"""The two ways in which a witness runs: alone beside one consumer process, or as `marshal run` around a command.

`marshal run` is what an init process of a container has to be, and no more: it starts the command, passes signals on,
reaps whatever ends, and ends as the command did. The command has a process group of its own. Where there is a terminal,
it shares the group of `marshal run`, as it would without it. What the terminal, or `kill %1` of a shell, sends to the
group reaches both, and is not passed on. A third process of the group tells which signals those are (`SignalProbe`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Final

from marshal_py.last_will import connecting
from marshal_py.last_will.connecting import VARIABLE, describe
from marshal_py.last_will.messages import DESCRIPTORS_MAX
from marshal_py.last_will.witness import Witness
from marshal_py.transport import bare_producer

NOT_FOUND: Final = 127  # exit codes of shells for a command that cannot be started
NOT_EXECUTABLE: Final = 126
SIGNALLED: Final = 128
STATUSES_MAX: Final = 1_000  # of reaped processes, kept until their pidfd has been looked at
FORWARDED: Final = connecting.ENDING.union(
    (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGALRM)
)
UNREMARKABLE: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM})
# `timeout` sends its signal to its child, then to its group: the command should get one.
GROUP_S: Final = 0.1  # how long the second may take to reach the probe
SAME_S: Final = 0.3  # how long a second one of those that end a program counts as the first
STOPS: Final = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})  # with which a terminal stops its processes
ANSWER_S: Final = 10.0  # a probe that does not answer for so long is given up; every signal is passed on then


def serve_parent() -> int:
    """The witness of the process at the other end of standard input. Returns when nobody needs it any more."""
    for number in connecting.ENDING:  # it ends with that process; a signal to its control group must not end it sooner
        signal.signal(number, signal.SIG_IGN)
    _raise_descriptor_limit()
    witness = Witness(f"process {os.getpid()}", bare_producer.create, lambda _pid: "")
    witness.connect(socket.socket(fileno=os.dup(0)))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    while witness.busy:
        witness.step()
    return 0


def run(command: list[str], held: frozenset[int]) -> int:
    """Runs a command and is the witness of every consumer in it. Returns the exit status for this process. `held`: the
    signals that were blocked while this process started (`connecting.hold`)."""
    for number in sorted(held.intersection(signal.sigpending())):
        if signal.getsignal(number) is not signal.SIG_IGN:
            _die_of(number)
            return SIGNALLED + number
    return Runner(command, held).run()


class SignalProbe:
    """A process in the group of this one that does nothing but take signals: it gets those that go to the group.
    Signals that this process blocks are blocked there, and wait until they are asked for."""

    def __init__(self) -> None:
        self._source, theirs = socket.socketpair()
        if os.fork():
            theirs.close()
            self._source.settimeout(ANSWER_S)
            return
        try:
            self._source.close()
            os.closerange(0, 3)
            while asked := theirs.recv(1):
                number = asked[0]
                got = number in signal.sigpending()
                if got:  # forgets it; sigwait would wait without end for a SIGTSTP that a SIGCONT has just taken back
                    signal.signal(number, signal.SIG_IGN)
                    signal.signal(number, signal.SIG_DFL)
                theirs.send(bytes((got,)))
        finally:
            os._exit(0)

    def got(self, number: int) -> bool:
        """Returns whether this signal went to the group."""
        try:
            self._source.send(bytes((number,)))
            return self._source.recv(1) == b"\1"
        except OSError:
            self._source.close()
            return False


class Runner:
    """A running command: its process, its witness, and what has ended below it."""

    def __init__(self, command: list[str], held: frozenset[int] = frozenset()) -> None:
        self._command = command
        self._held = held
        self._terminal = _has_terminal()
        self._child = 0
        self._status: int | None = None  # of the command, once it has ended, as os.waitpid returns it
        self._statuses: dict[int, int] = {}
        self._probe: SignalProbe | None = None
        self._shared: set[int] = set()  # signals that the command got without this process
        self._again: dict[int, float] = {}  # signal -> until when one more of it is the same (time.monotonic)
        self._witness = Witness(f"marshal run {os.getpid()}", bare_producer.create, self._how)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._theirs = theirs.detach()
        self._woken, self._waker = os.pipe()

    def run(self) -> int:
        os.set_blocking(self._woken, False)
        self._ours.setblocking(False)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one who ignores it never learns a status
        # A thread takes them, in the order of their numbers: a handler of Python would lose that order.
        handled = FORWARDED | {signal.SIGCHLD} | (STOPS if self._terminal else frozenset())
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        waits, begins = os.pipe()
        self._child = self._start(mask - self._held, waits, begins)
        _raise_descriptor_limit()  # not before: the command keeps the limit that it was given
        os.close(self._theirs)
        self._probe = SignalProbe() if self._terminal else None
        os.write(begins, b"\0")
        os.close(begins)
        os.close(waits)
        listener = threading.Thread(target=self._listen, args=(handled,), name="marshal-signals", daemon=True)
        listener.start()
        selector = self._witness.selector
        selector.register(self._woken, selectors.EVENT_READ, self._wake)
        selector.register(self._ours, selectors.EVENT_READ, self._accept)
        while self._status is None:
            self._witness.step()
            self._reap()
        os.kill(os.getpid(), signal.SIGCHLD)  # what came before it has been taken when the thread ends
        listener.join()
        self._wake()
        self._settle()
        code = os.waitstatus_to_exitcode(self._status)
        if -code in self._shared:
            _die_of(-code)  # a script around this process ends only if it learns of ctrl-C
        elif code < 0 and -code not in UNREMARKABLE:  # a shell would name it; it sees an exit status
            sys.stderr.write(f"marshal run: {self._command[0]} ended by {in_words(self._status)}\n")
        return code if code >= 0 else SIGNALLED - code

    def _settle(self) -> None:
        """Publishes the wills of what has ended. Who still lives below the command loses its witness. What this process
        has not read yet counts: it may have been stopped while the command lived."""
        self._accept()
        for connection in list(self._witness.connections):
            connection.settle()
        while self._witness.unacknowledged:
            self._witness.step()

    def _start(self, mask: set[signal.Signals | int], waits: int, begins: int) -> int:
        """Starts the command with this signal mask. Returns its process, which waits for a byte before it becomes the
        command: a key that is pressed at what the command prints must find the probe."""
        child = os.fork()
        if child:
            if not self._terminal:
                with contextlib.suppress(OSError):  # it may have done so itself, or be gone
                    os.setpgid(child, child)
            return child
        try:
            os.close(begins)
            if not os.read(waits, 1):  # `marshal run` is gone
                os._exit(NOT_FOUND)
            if not self._terminal:
                os.setpgid(0, 0)
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python has ignored
                signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.set_inheritable(self._theirs, True)
            os.environ[VARIABLE] = describe(self._theirs)
            os.execvp(self._command[0], self._command)
        except (OSError, ValueError) as error:
            why = (isinstance(error, OSError) and error.errno) or errno.ENOENT  # ValueError: the name is empty
            sys.stderr.write(f"marshal run: {self._command[0] or repr('')}: {os.strerror(why)}\n")
            sys.stderr.flush()
            os._exit(NOT_FOUND if why == errno.ENOENT else NOT_EXECUTABLE)

    # --- signals

    def _listen(self, handled: frozenset[signal.Signals]) -> None:
        """Takes signals until the command has ended. Each goes to the loop as two bytes: its number, and whether the
        command got it without this process, or a later one that undoes it."""
        while True:
            number = signal.sigwait(handled)
            same = time.monotonic() < self._again.get(number, 0)
            # Asked for a skipped one, too: the probe's copy of it would make a later signal seem to be the group's.
            probe = self._probe if number != signal.SIGCHLD else None
            shared = probe is not None and (probe.got(number) or _undone(number))
            if same:
                continue
            if number in connecting.ENDING:
                if probe is not None and not shared:
                    time.sleep(GROUP_S)
                    shared = probe.got(number)
                self._again[number] = time.monotonic() + SAME_S
            os.write(self._waker, bytes((number, shared)))
            if number == signal.SIGCHLD and self._status is not None:
                return

    def _wake(self) -> None:
        """Passes on the signals that have come. SIGCHLD only has to wake the loop."""
        with contextlib.suppress(BlockingIOError):
            while found := os.read(self._woken, 4_096):
                for number, shared in zip(found[::2], found[1::2], strict=True):
                    if shared:
                        self._shared.add(number)
                    elif number != signal.SIGCHLD and self._status is None:
                        with contextlib.suppress(PermissionError):  # a command that runs as another user, such as sudo
                            os.kill(self._child, number)

    def _stop(self, number: int) -> None:
        """Stops as the command did, if its terminal stopped it, until SIGCONT: the shell waits for this process.
        Somebody who stops the command alone (SIGSTOP) continues it alone, too: the witness stays awake."""
        if number in STOPS:
            signal.raise_signal(number)  # pending: SIGCONT takes it back together with the terminal's own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    # --- events

    def _accept(self) -> None:
        """Takes the sockets that processes below have sent."""
        while True:
            try:
                _, fds, _, _ = socket.recv_fds(self._ours, 16, DESCRIPTORS_MAX)
            except OSError:
                return
            for fd in fds:
                os.set_inheritable(fd, False)
                self._witness.connect(socket.socket(fileno=fd))

    def _reap(self) -> None:
        """Collects every process that has ended: the command, its children, and orphans where this is process 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | (os.WUNTRACED if self._terminal else 0))
            except ChildProcessError:
                return
            if not pid:
                return
            if os.WIFSTOPPED(status):
                if pid == self._child:
                    self._stop(os.WSTOPSIG(status))
                continue
            if pid == self._child:
                self._status = status
            self._statuses[pid] = status
            while len(self._statuses) > STATUSES_MAX:
                del self._statuses[next(iter(self._statuses))]

    def _how(self, pid: int) -> str:
        """Returns how a process ended, if it was a child of this one; else ""."""
        self._reap()
        status = self._statuses.get(pid)
        return "" if status is None else in_words(status)


def in_words(status: int) -> str:
    """Returns how a process ended, from the status that os.waitpid returned, such as "signal 9 (SIGKILL)"."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _raise_descriptor_limit() -> None:
    """Takes as many descriptors as this process may have: a witness holds two of each process and one of each
    session."""
    with contextlib.suppress(ValueError, OSError):  # macOS refuses its own "unlimited"
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _undone(number: int) -> bool:
    """Returns whether a later signal, which still waits here, undoes this one: SIGCONT a stop, and a stop SIGCONT. The
    later one has taken this one back in the probe. Passed on now, this one would undo the later one in the command."""
    later = STOPS if number == signal.SIGCONT else {signal.SIGCONT} if number in STOPS else frozenset()
    return not later.isdisjoint(signal.sigpending())


def _has_terminal() -> bool:
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _die_of(number: int) -> None:
    """Ends this process by a signal. Returns if it is process 1, which no signal ends."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # no second core file, and 1 tells a crash reporter so
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
