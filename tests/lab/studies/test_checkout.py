import subprocess

from lgelu_lab.studies.checkout import last_commit


def git(folder, *words):
    given = ("git", "-c", "user.name=a", "-c", "user.email=a@b", *words)
    return subprocess.run(given, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_the_last_that_changed_the_paths(tmp_path):
    git(tmp_path, "init", "--quiet")
    commits = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "--message", name)
        commits[name] = git(tmp_path, "rev-parse", "--short", "HEAD")
    assert last_commit("a", inside=tmp_path / "b") == commits["a"] != commits["b"]
    assert last_commit("a", "b", inside=tmp_path) == commits["b"]
    (tmp_path / "a" / "file").write_text("changed")
    assert last_commit("a", inside=tmp_path) == commits["a"] + "-dirty"
    assert last_commit("b", inside=tmp_path) == commits["b"]
