"""Whatever programs do, they get a result, the next one runs normally, and nothing of them remains."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.sandbox.pool import ProgramResult, Sandbox, SandboxLimits, shorten
from tests.processes import gone, lives
from tests.thorough import further

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SHORT = SandboxLimits(seconds=20, cpu_seconds=20)  # for what is ended by something else than time


@pytest.fixture(params=["user", *further("root", "landlock")])
def mechanism(request):
    return request.param


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory, monkeypatch):
    """A folder for the sandbox's files, which is empty again after each test."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def below(pid):
    """Returns every process that one has started, and theirs."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True) if lives(child)]
    except psutil.NoSuchProcess:
        return []


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def run(*programs, mechanism=None, limits=SHORT, stdin="", workers=1, **settings):
    """Returns the results of programs that run one after the other in one sandbox, each followed by a normal one."""

    async def all_of_them():
        sandbox = Sandbox(limits, workers, **settings, **({"mechanisms": (mechanism,)} if mechanism else {}))
        await sandbox.start()
        guard = sandbox._fork_server.guard.pid
        if mechanism and not sandbox._fork_server.confined:
            await sandbox.close()
            pytest.skip(f"this machine does not allow {mechanism}")
        try:
            results = []
            for program in programs:
                results.append(await sandbox.run(program, stdin))
                await until(lambda: len(below(guard)) <= 1)  # the fork server alone
                assert list(Path(sandbox._fork_server.base).iterdir()) == []
                well = await sandbox.run("print(6 * 7)")
                assert (well.output, well.status) == ("42\n", "ok")
        finally:
            await sandbox.close()
        assert not psutil.pid_exists(guard)
        return results

    results = asyncio.run(all_of_them())
    return results[0] if len(results) == 1 else results


def test_what_a_program_prints_is_its_output(mechanism):
    result = run("import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')", mechanism=mechanism)
    assert result == ProgramResult("a\nb\nc\n", None, False, result.seconds, "ok")
    assert 0 < result.seconds < 20
    assert result.text() == "a\nb\nc"


def test_a_program_that_prints_nothing_is_shown_as_a_sentence():
    assert run("x = 1").text() == "(the program printed nothing)"


def test_standard_input_is_read_and_may_be_long_or_missing():
    long = "äö\n" * 300_000
    assert run("import sys; print(len(sys.stdin.read()), 'x')", stdin=long).output == f"{len(long)} x\n"
    assert run("input()").error.endswith("EOFError: EOF when reading a line")


def test_the_value_of_a_last_expression_is_printed_where_asked():
    program = "x = 3\nprint('p')\n[x,\n 'two']"
    assert run(program, echo_last=True).output == "p\n[3, 'two']\n"
    assert run(program).output == "p\n"
    assert run("x = 3\nNone", echo_last=True).output == ""
    assert run("for i in range(2):\n    i", echo_last=True).output == ""
    assert run("'a'\n1 / 0", echo_last=True).error.endswith("ZeroDivisionError: division by zero")


def test_an_exception_is_a_traceback_of_the_program_alone(mechanism):
    result = run("def f(x):\n    return 1 / x\n\nprint('before')\nf(0)", mechanism=mechanism)
    assert (result.output, result.status) == ("before\n", "error")
    lines = result.error.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('main.py", line 5, in <module>')
    assert lines[2] == "    f(0)"
    assert lines[3].endswith('main.py", line 2, in f')
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert result.text() == f"before\n{result.error}"


def test_a_syntax_error_names_its_line():
    result = run("x = 1\ndef f(:")
    assert result.status == "error"
    assert 'main.py", line 2' in result.error
    assert result.error.endswith("SyntaxError: invalid syntax")


def test_endless_recursion_is_an_error():
    result = run("def f():\n    return f()\nf()")
    assert result.status == "error"
    assert "RecursionError" in result.error


def test_a_text_that_no_program_can_be_is_an_error():
    assert "null bytes" in run("print(1)\0").error
    assert run("print('\ud800')").status == "error"


@pytest.mark.parametrize(
    ("program", "status", "error"),
    [
        ("import sys; sys.exit()", "ok", None),
        ("raise SystemExit(0)", "ok", None),
        ("import sys; sys.exit(3)", "error", "exit status 3"),
        ("import sys; sys.exit('no luck')", "error", "no luck"),
        ("import os; os._exit(0)", "ok", None),
        ("import os; os._exit(7)", "error", "exit status 7"),
        ("import ctypes; ctypes.string_at(0)", "killed", "the program was ended by SIGSEGV"),
        ("import os; os.kill(os.getpid(), 9)", "killed", "the program was ended by SIGKILL"),
        ("import os; os.abort()", "killed", "the program was ended by SIGABRT"),
    ],
)
def test_how_a_program_ends_is_told(program, status, error):
    result = run(program)
    assert (result.status, result.error) == (status, error)


def test_threads_and_what_is_registered_for_the_end_are_waited_for():
    program = (
        "import atexit, threading\n"
        "event = threading.Event()\n"
        "def late():\n    event.wait()\n    print('late')\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=late).start()\n"
        "event.set()\n"
    )
    assert run(program).output == "late\nlast\n"


def test_an_endless_loop_and_an_endless_sleep_are_ended_and_what_was_printed_is_kept(mechanism):
    busy, asleep = run(
        "print('x')\nwhile True: pass",
        "import time\nprint('y')\ntime.sleep(10_000)",
        limits=SandboxLimits(seconds=1),
        mechanism=mechanism,
    )
    assert (busy.output, busy.status, busy.error) == ("x\n", "timeout", "the program was ended after 1 seconds")
    assert (asleep.output, asleep.status) == ("y\n", "timeout")
    assert busy.seconds >= 1


def test_processor_time_has_a_limit_of_its_own(mechanism):
    result = run("while True: pass", limits=SandboxLimits(seconds=100, cpu_seconds=1), mechanism=mechanism)
    assert (result.status, result.error) == ("timeout", "the program used its 1 seconds of processor time")


def test_a_program_that_ignores_signals_is_ended_too(mechanism):
    program = (
        "import signal\n"
        "for s in range(1, 32):\n"
        "    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError: pass\n"
        "while True: pass"
    )
    assert run(program, limits=SandboxLimits(seconds=0.5), mechanism=mechanism).status == "timeout"
    assert run(program, limits=SandboxLimits(seconds=100, cpu_seconds=1), mechanism=mechanism).status == "killed"


def test_too_much_memory_is_an_error_of_the_program_which_it_can_read(mechanism):
    limits = SandboxLimits(seconds=60, memory_mb=200)
    at_once, little_by_little, in_small_things, in_one_size, caught = run(
        "x = bytearray(1_000_000_000)",
        "kept = []\nwhile True: kept.append(bytearray(10_000_000))",
        "kept = []\nwhile True: kept.append([kept])",
        "kept = None\nwhile True: kept = (kept,)",
        "try: bytearray(1_000_000_000)\nexcept MemoryError: print('I see')",
        limits=limits,
        mechanism=mechanism,
    )
    for result in (at_once, little_by_little, in_small_things, in_one_size):
        assert result.status == "memory"
        assert result.error.count("MemoryError") == 1
        assert result.error.endswith("MemoryError")
    assert "line 1" in at_once.error
    assert (caught.output, caught.status) == ("I see\n", "ok")


def test_memory_that_is_shared_and_that_of_several_processes_counts_together(mechanism):
    limits = SandboxLimits(seconds=20, memory_mb=200, processes=10)
    shared = "import mmap\nm = mmap.mmap(-1, 1_000_000_000)\nwhile True:\n    for i in range(0, len(m), 4096): m[i] = 1"
    each_its_own = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        x = b'1' * 90_000_000\n"
        "        time.sleep(1000)\n"
        "time.sleep(1000)"
    )
    the_same = (
        "import os, time\n"
        "x = b'1' * 120_000_000\n"
        "for _ in range(4): os.fork() or (time.sleep(0.5), os._exit(0))\n"
        "for _ in range(4): os.wait()"
    )
    shared, several, read_by_several = run(shared, each_its_own, the_same, limits=limits, mechanism=mechanism)
    for result in (shared, several):
        assert (result.status, result.error) == ("memory", "the program used more than 200 MB of memory")
    assert read_by_several.status == "ok"


def test_a_fork_bomb_is_stopped_and_all_of_it_ends(mechanism):
    limits = SandboxLimits(seconds=1, processes=8)
    loud, quiet = run(
        "import os, time\nfor _ in range(50): os.fork() or time.sleep(1000)\ntime.sleep(1000)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        limits=limits,
        mechanism=mechanism,
    )
    if mechanism == "landlock" or (mechanism == "user" and os.geteuid() == 0):  # whose processes the kernel does not count
        assert loud.error == quiet.error == "the program had more than 8 processes or threads"
        assert loud.status == quiet.status == "killed"
    else:
        assert loud.error.endswith("BlockingIOError: [Errno 11] Resource temporarily unavailable")
        assert quiet.status == "timeout"


def test_as_many_processes_as_are_allowed_run(mechanism):
    program = (
        "import os, time\n"
        "for _ in range(7): os.fork() or (time.sleep(0.3), os._exit(0))\n"
        "for _ in range(7): os.wait()\n"
        "print('all')"
    )
    assert run(program, limits=SandboxLimits(processes=8), mechanism=mechanism).output == "all\n"


def test_threads_count_as_processes_do(mechanism):
    program = (
        "import threading, time\n"
        "for _ in range(50): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "time.sleep(1000)"
    )
    result = run(program, limits=SandboxLimits(seconds=20, processes=8), mechanism=mechanism)
    counted = result.error == "the program had more than 8 processes or threads"
    assert counted or result.error.endswith("RuntimeError: can't start new thread")


def test_files_that_are_deleted_and_still_held_count(mechanism):
    held = (
        "import os, mmap, time\n"
        "kept = []\n"
        "for i in range(8):\n"
        "    f = open('x', 'w+b')\n"
        "    f.write(bytes(1_000_000))\n"
        "    f.flush()\n"
        "    os.unlink('x')\n"
    )
    by_descriptor = f"{held}    kept.append(f)\ntime.sleep(1000)"
    by_mapping = f"{held}    kept.append(mmap.mmap(f.fileno(), 4096))\n    f.close()\ntime.sleep(1000)"
    for result in run(by_descriptor, by_mapping, limits=SandboxLimits(seconds=20, file_mb=4), mechanism=mechanism):
        assert "No space left" in result.error or result.error == "the program wrote more than 1000 files or 4 MB"


def test_what_a_program_leaves_in_the_background_is_gone(mechanism):
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(10_000)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print('done')"
    )
    result = run(program, mechanism=mechanism)  # run waits until nothing is left below the guard
    assert (result.output, result.status) == ("done\n", "ok")
    assert result.seconds < 20


def test_other_commands_can_be_run():
    program = "import subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', 'print(7)']))"
    assert run(program).output == "b'7\\n'\n"


def test_processes_with_locks_of_their_own_work():
    program = "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: print(pool.map(abs, [-1, -2]))"
    assert run(program).output == "[1, 2]\n"


def test_endless_output_is_cut_in_the_middle_and_says_so(mechanism):
    limits = SandboxLimits(seconds=1, output_characters=100)
    result = run("n = 0\nwhile True:\n    print(f'{n:09d}')\n    n += 1", limits=limits, mechanism=mechanism)
    assert (result.status, result.truncated) == ("timeout", True)
    head, note, tail = result.output.partition("\n[output truncated: the first 50 and the last 50 characters are shown]\n")
    assert note
    assert head == "".join(f"{n:09d}\n" for n in range(5))
    assert len(tail) == 50
    assert all(len(line) <= 9 for line in tail.split("\n"))


def test_a_long_error_is_cut_in_the_middle():
    result = run("raise ValueError('x' * 100_000 + 'end')", limits=SandboxLimits(output_characters=1000))
    assert len(result.error) < 1100
    assert result.error.endswith("end")


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit('x' * 500_000 + 'end')",
        'import os; os.write(3, b\'{"status": "error", "error": "\' + b"x" * 50_000 + b\'end"}\'); os._exit(1)',
    ],
)
def test_an_error_that_the_program_words_itself_is_cut_too(program):
    result = run(program, limits=SandboxLimits(output_characters=1000))
    assert result.status == "error"
    assert len(result.error) < 1100
    assert result.error.endswith("end")


def test_output_that_is_no_text_is_shown_with_marks():
    program = "import sys; sys.stdout.buffer.write(b'a\\xff\\xfeb'); print('\\ud800')"
    assert run(program).output == "a\ufffd\ufffdb\\ud800\n"


@pytest.mark.parametrize("size", [99, 100, 101, 250, 1000])
def test_a_text_is_shortened_only_where_it_is_too_long(size):
    text = "".join(chr(0x1F600 + n % 50) for n in range(size))
    result = run(f"print({text!r}, end='')", limits=SandboxLimits(output_characters=100))
    assert result.truncated == (size > 100)
    if size <= 100:
        assert result.output == text
    else:
        assert result.output.startswith(text[:50] + "\n[")
        assert result.output.endswith("]\n" + text[-50:])


def test_shortened_joins_what_is_whole():
    assert shorten("ab", "cd", False, 4) == ("abcd", False)
    text, cut = shorten("ab", "cd", False, 2)
    assert cut
    assert text.startswith("a\n[output truncated")
    assert text.endswith("\nd")


def test_files_outside_the_folder_cannot_be_read(mechanism, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    secret.chmod(0o644)
    places = ["/etc/passwd", __file__, str(Path(__file__).parents[2] / "pyproject.toml"), str(secret), "/proc/1/environ"]
    places += ["/../etc/passwd", "../" * 9 + "etc/passwd"]  # where the old root would be, were it still there
    program = f"for p in {places!r}:\n    try: print(p, open(p).read())\n    except OSError as e: print(type(e).__name__)"
    result = run(program, mechanism=mechanism)
    assert set(result.output.split()) <= {"FileNotFoundError", "PermissionError"}
    assert len(result.output.split()) == len(places)


def test_files_outside_the_folder_cannot_be_written_and_what_is_inside_is_gone_afterwards(mechanism, tmp_path):
    tmp_path.chmod(0o777)
    places = [str(tmp_path / "x"), "/etc/x", "/usr/x", "/x", "/home/x", f"{sys.prefix}/x", f"{sys.base_prefix}/x", "/dev/x"]
    program = (
        f"for p in {places!r}:\n"
        "    try: open(p, 'w'); print('written', p)\n"
        "    except OSError: pass\n"
        "open('inside', 'w').write('x')\n"
        "print(open('inside').read())"
    )
    assert run(program, mechanism=mechanism).output == "x\n"
    assert list(tmp_path.iterdir()) == []


def test_each_program_has_a_folder_of_its_own(mechanism):
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w')\nos.mkdir('a')\nos.chmod('a', 0)"
    assert [result.output for result in run(program, program, mechanism=mechanism)] == ["['main.py']\n"] * 2


def test_temporary_files_go_to_the_folder(mechanism):
    assert (
        run("import os, tempfile\nprint(os.path.dirname(tempfile.mkstemp()[1]) == os.getcwd())", mechanism=mechanism).output
        == "True\n"
    )


def test_files_are_limited_in_size_and_number(mechanism):
    limits = SandboxLimits(seconds=20, file_mb=2, files=10)
    big, much, many, enough = run(
        "open('x', 'wb').write(bytes(3_000_000))",
        "import time\nfor i in range(9): open(str(i), 'wb').write(bytes(500_000))\ntime.sleep(1)",
        "import time\nfor i in range(20): open(str(i), 'w')\ntime.sleep(1)",
        "for i in range(10): open(str(i), 'w').write('x')",
        limits=limits,
        mechanism=mechanism,
    )
    assert big.status == "error"
    assert "File too large" in big.error or "No space left" in big.error
    for result in (much, many):
        assert "No space left" in result.error or result.error == "the program wrote more than 10 files or 2 MB"
    assert enough.status == "ok"


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX", "AF_NETLINK"])
def test_no_socket_can_be_opened_not_even_to_this_machine(mechanism, family):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"AF_INET": ("127.0.0.1", server.getsockname()[1]), "AF_UNIX": "\0x", "AF_NETLINK": (0, 0)}[family]
        result = run(f"import socket\nsocket.socket(socket.{family}).connect({address!r})", mechanism=mechanism)
    assert result.error.splitlines()[-1] == "PermissionError: [Errno 1] Operation not permitted"


def test_what_runs_on_a_pair_of_sockets_works():
    assert run("import asyncio\nasync def f(): print('in a loop')\nasyncio.run(f())").output == "in a loop\n"


def test_a_program_cannot_end_what_is_above_or_beside_it(mechanism):
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        program = (
            "import os, signal\n"
            f"for pid in [os.getppid(), {victim.pid}, {os.getpid()}, 1, 0]:\n"
            "    try: pid and os.kill(pid, signal.SIGKILL)\n"
            "    except OSError as error: pass\n"
            "print('still here')\n"
        )
        result, everything = run(program, "import os\nos.kill(-1, 9)\nprint('x')", mechanism=mechanism)
        assert result.output == "still here\n"
        assert everything.status in ("ok", "killed", "error")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_keys_in_the_environment_are_not_seen(mechanism, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-12345")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    result = run(
        "import os, sys\nprint(sorted(os.environ), sys.argv, sys.path, os.environ['HOME'] == os.getcwd())", mechanism=mechanism
    )
    assert "SOME_API_KEY" not in result.output
    assert "sk-12345" not in result.output
    assert "PYTHONPATH" not in result.output
    assert result.output.endswith("True\n")


def test_nothing_of_this_project_is_there(mechanism):
    result = run("import sys\nprint([m for m in sys.modules if 'areal' in m])\nimport areal_x", mechanism=mechanism)
    assert result.output == "[]\n"
    assert result.error.endswith("ModuleNotFoundError: No module named 'areal_x'")


def test_no_right_can_be_gained(mechanism):
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = {'users': lambda: libc.unshare(0x10000000), 'mount': lambda: libc.mount(b'x', b'.', b'tmpfs', 0, None),\n"
        "  'memory': lambda: libc.memfd_create(b'x', 0), 'trace': lambda: libc.ptrace(0, 0, 0, 0),\n"
        "  'clone': lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if os.uname().machine == 'x86_64' else -1,\n"
        "  'limit': lambda: libc.prlimit(0, 2, (ctypes.c_ulong * 2)(2**63, 2**63), None)}\n"
        "print({name: call() for name, call in calls.items()})\n"
        "try: os.setuid(0); print(open('/etc/shadow').read())\n"
        "except OSError: print('no')\n"
    )
    answers, last = run(program, mechanism=mechanism).output.splitlines()
    assert answers == str(dict.fromkeys(["users", "mount", "memory", "trace", "clone", "limit"], -1))
    assert last == "no"


def test_no_descriptor_of_others_is_open(mechanism):
    program = "import os\nfor fd in range(4, 300):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
    assert run(program, mechanism=mechanism).output == ""


def test_forty_programs_at_once_each_get_their_own_answer(mechanism):
    async def all_of_them():
        sandbox = Sandbox(SandboxLimits(seconds=60), workers=8, mechanisms=(mechanism,))
        try:
            program = "open('x', 'w').write('{}')\nprint(input(), open('x').read())"
            programs = (sandbox.run(program.format(n), f"i{n}") for n in range(40))
            return await asyncio.gather(*programs)
        finally:
            await sandbox.close()

    results = asyncio.run(all_of_them())
    assert [result.output for result in results] == [f"i{n} {n}\n" for n in range(40)]


def test_no_more_programs_run_at_once_than_there_are_workers():
    async def most():
        sandbox = Sandbox(SandboxLimits(seconds=60), workers=2)
        await sandbox.start()
        seen = 0
        running = [asyncio.create_task(sandbox.run("import time; time.sleep(0.2)")) for _ in range(6)]
        while not all(task.done() for task in running):
            children = psutil.Process(sandbox._fork_server.guard.pid).children()
            seen = max(seen, *(len(below(child.pid)) for child in children)) if children else seen
            await asyncio.sleep(0.005)
        await sandbox.close()
        return seen

    assert asyncio.run(most()) <= 2 * 3  # supervisor, init and program


def test_a_cancelled_run_is_ended_with_all_that_it_started(mechanism):
    async def cancelled():
        sandbox = Sandbox(SandboxLimits(seconds=1000), workers=1, mechanisms=(mechanism,))
        await sandbox.start()
        guard = sandbox._fork_server.guard.pid
        running = asyncio.create_task(sandbox.run("import os, time\nos.fork() or os.setsid()\ntime.sleep(10_000)"))
        await until(lambda: len(below(guard)) >= 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: len(below(guard)) <= 1)
        well = await sandbox.run("print(1)")
        await sandbox.close()
        return well.output

    assert asyncio.run(cancelled()) == "1\n"


def test_closing_ends_what_runs():
    async def closed():
        sandbox = Sandbox(SandboxLimits(seconds=1000), workers=1)
        await sandbox.start()
        guard = sandbox._fork_server.guard.pid
        running = asyncio.create_task(sandbox.run("import time; time.sleep(10_000)"))
        await until(lambda: len(below(guard)) >= 3)
        started = below(guard)
        await sandbox.close()
        await sandbox.close()
        result = await running
        assert not any(map(psutil.pid_exists, started))
        return result

    result = asyncio.run(closed())
    assert (result.status, result.error) == ("killed", "the program's process was ended from outside")


def test_closing_ends_a_guard_that_a_program_without_walls_has_stopped():
    async def closed():
        sandbox = Sandbox(workers=1, mechanisms=())
        await sandbox.start()
        guard = sandbox._fork_server.guard.pid
        result = await sandbox.run(f"import os, signal\nos.kill({guard}, signal.SIGSTOP)")
        assert psutil.Process(guard).status() == psutil.STATUS_STOPPED
        await sandbox.close()
        return result.status, psutil.pid_exists(guard)

    assert asyncio.run(closed()) == ("ok", False)


@pytest.mark.parametrize("which", ["guard", "fork_server", "supervisor"])
def test_a_sandbox_whose_process_died_makes_a_new_one(mechanism, which):
    async def killed():
        sandbox = Sandbox(SandboxLimits(seconds=1000), workers=1, mechanisms=(mechanism,))
        await sandbox.start()
        guard = psutil.Process(sandbox._fork_server.guard.pid)
        running = asyncio.create_task(sandbox.run("import time; time.sleep(10_000)"))
        await until(lambda: len(below(guard.pid)) >= 3)
        started = below(guard.pid)
        (fork_server,) = guard.children()
        supervisor = fork_server.children()[0]
        {"guard": guard, "fork_server": fork_server, "supervisor": supervisor}[which].kill()
        result = await running
        ended = started[1:] if which == "supervisor" else started
        await until(lambda: all(map(gone, ended)))
        well = await sandbox.run("print(1)")
        await sandbox.close()
        return result.status, well.output

    assert asyncio.run(killed()) == ("killed", "1\n")


def test_programs_end_when_the_run_is_killed(temporary, mechanism):
    script = (
        "import asyncio, sys, tempfile\n"
        "from areal_x.sandbox.pool import Sandbox, SandboxLimits\n"
        "tempfile.tempdir = sys.argv[1]\n"
        f"sandbox = Sandbox(SandboxLimits(seconds=1000), mechanisms=({mechanism!r},))\n"
        "asyncio.run(sandbox.run('import os, time; os.fork() or os.setsid(); time.sleep(10_000)'))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(temporary)], cwd=Path(__file__).parents[2]) as run_itself:
        asyncio.run(until(lambda: len(below(run_itself.pid)) >= 5))
        started = below(run_itself.pid)
        run_itself.kill()
    asyncio.run(until(lambda: not any(map(psutil.pid_exists, started))))
    asyncio.run(until(lambda: not list(temporary.iterdir())))


def test_packages_can_be_left_out_and_modules_imported_in_advance():
    program = "import sys\nprint('numpy' in sys.modules)\nimport numpy\nprint(int(numpy.arange(3).sum()))"
    with_numpy = run(program, imports=("numpy",))
    assert with_numpy.output == "True\n3\n"
    assert run("import numpy", packages=False).error.endswith("ModuleNotFoundError: No module named 'numpy'")
    assert run("import numpy, sys\nprint(numpy.__name__)").output == "numpy\n"


def test_a_module_that_is_not_there_is_refused_at_the_start():
    async def start():
        sandbox = Sandbox(imports=("no_such_module",))
        try:
            await sandbox.start()
        finally:
            await sandbox.close()

    with pytest.raises(ConfigError, match=r"imports = 'no_such_module' cannot work.*ModuleNotFoundError"):
        asyncio.run(start())


def test_without_any_wall_programs_run_and_it_is_said_once(caplog):
    async def unconfined():
        sandbox = Sandbox(workers=1, mechanisms=())
        first = await sandbox.run("print(1)")
        await sandbox.close()
        second = await sandbox.run("print(2)")
        await sandbox.close()
        return first, second

    first, second = asyncio.run(unconfined())
    assert (first.output, second.output) == ("1\n", "2\n")
    assert not first.confined
    assert not second.confined
    assert caplog.text.count("programs in the sandbox can read and write this machine's files") == 1


def test_elsewhere_than_on_linux_the_sandbox_says_so(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="needs Linux"):
        asyncio.run(Sandbox().start())


@pytest.mark.parametrize("name", ["seconds", "cpu_seconds", "memory_mb", "output_characters", "processes", "file_mb", "files"])
def test_limits_that_cannot_work_are_refused(name):
    with pytest.raises(ConfigError, match=rf"sandbox\.{name} = 0"):
        SandboxLimits(**{name: 0})


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="workers = 0"):
        Sandbox(workers=0)
    with pytest.raises(ConfigError, match="did you mean 'landlock'"):
        Sandbox(mechanisms=("landlok",))
