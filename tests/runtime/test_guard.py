"""The guard ends all that its worker started; what it does for rewards and the sandbox is tested there."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from areal_x.runtime import guard


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_namespace_that_allows_nothing_is_not_entered(monkeypatch):
    tried = []

    def unshare(flags):  # as root's is refused, and the other given without a right to name users in it
        tried.append(flags)
        return -1 if len(tried) == 1 else 0

    monkeypatch.setattr(guard, "LIBC", SimpleNamespace(unshare=unshare))
    assert not guard.leave_network()
    assert len(tried) == 1  # what came after was another process's


def test_a_folder_is_removed_with_what_its_owner_may_not_look_into_and_what_a_link_leads_to_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    outside.chmod(0o755)
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    guard.remove_tree(str(folder))
    assert not folder.exists()
    assert (outside / "kept").read_text() == "x"
    assert outside.stat().st_mode & 0o777 == 0o755


def test_processes_below_are_counted_no_further_than_asked_and_all_of_them_end():
    lines = (  # in a process without children of others
        "import os",
        "from areal_x.runtime import guard",
        "child = os.fork()",
        "if child == 0: os.execvp('sleep', ['sleep', '1000'])",
        "print(guard.has_more_than(0), guard.has_more_than(1), guard.shell_exit_code(guard.end_all(child)))",
    )
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(sys.platform == "linux"), "False", "137"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_processes_that_start_one_another_without_end_are_found_and_ended_however_deep_they_are(tmp_path):
    deep = tmp_path / "deep.sh"
    deep.write_text('if [ $1 = 0 ]; then echo x; exec sleep 1000; fi\nsh "$0" $(($1 - 1)) & wait')
    lines = (
        "import os, subprocess, sys",
        "from areal_x.runtime import guard",
        "guard.LIBC.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)",
        "child = subprocess.Popen(['sh', sys.argv[1], '1049'], stdout=subprocess.PIPE)",
        "child.stdout.read(1)",
        "print(len(list(guard.descendants(os.getpid()))), guard.end_all(child.pid), guard.children(os.getpid()))",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(deep)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "1050 -9 []\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_ends_while_it_is_looked_at_has_no_children(monkeypatch):
    def gone(path):
        raise FileNotFoundError(path)

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in guard.children(os.getpid())
        for name in ("listdir", "scandir"):
            monkeypatch.setattr(os, name, gone)
        assert guard.children(os.getpid()) == []
