"""Builds what pyproject.toml describes, with the examples inside the package.

`areal-x example NAME` copies them from there (areal_x/example.py). An editable installation reads
the examples of the checkout instead.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = Path("examples")
SUFFIXES = (".py", ".gin", ".mjs", ".json", ".txt", ".yaml")


class WithExamples(build_py):
    """Also copies examples/ to areal_x/_examples."""

    def examples(self) -> dict[str, str]:
        """The source of each copy."""
        files = [f for f in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/*")) if f.suffix in SUFFIXES]
        folder = Path(self.build_lib, "areal_x", "_examples")
        return {str(folder / file.relative_to(EXAMPLES)): str(file) for file in sorted(files)}

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for target, file in self.examples().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(file, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self.examples()]

    def get_source_files(self) -> list[str]:  # what a source distribution holds
        return [*super().get_source_files(), *self.examples().values()]


setup(cmdclass={"build_py": WithExamples})
