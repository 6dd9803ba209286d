"""MovieLens 100K as the package `recbole` carries it, written in the form in which GroupLens published it.

The package is found and never imported: only its files are wanted, and none of what it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

PACKAGE, FOLDER = "recbole", "recbole/dataset_example/ml-100k"
GENRES = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)


def write_movielens_100k(folder: Path) -> None:
    """Write u.data, u.item, u.user and u.genre into a new folder.

    The parts u1 to u5, release dates and addresses are not in the package; nothing here reads the latter two.

    Raises:
        PackageNotFoundError: without the package, of requirements-dev.txt.
    """
    source = Path(str(distribution(PACKAGE).locate_file(FOLDER)))
    folder.mkdir()
    write_lines(folder / "u.data", ("\t".join(fields) for fields in rows_of(source / "ml-100k.inter")))
    write_lines(folder / "u.user", ("|".join(fields) for fields in rows_of(source / "ml-100k.user")))
    write_lines(folder / "u.item", (movie_line(*fields) for fields in rows_of(source / "ml-100k.item")))
    write_lines(folder / "u.genre", (f"{name}|{place}" for place, name in enumerate(GENRES)))


def rows_of(path: Path) -> Iterator[list[str]]:
    """The fields of each line behind the header."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return (line.split("\t") for line in lines[1:] if line)


def movie_line(movie_id: str, title: str, year: str, genres: str) -> str:
    """A line of u.item: number, title with its year, two dates, an address, and a mark for each genre.

    Raises:
        ValueError: for a genre that the set does not have.
    """
    named = genres.split()
    if not set(named) <= set(GENRES):
        raise ValueError(f"movie {movie_id} has genres that are not those of the set: {genres}")
    # Two movies have no number there: of one the year is still in its title, of the other it is not known.
    full_title = f"{title} ({year})" if year.isdigit() else title
    return "|".join([movie_id, full_title, "", "", "", *(str(int(name in named)) for name in GENRES)])


def write_lines(path: Path, lines: Iterator[str]) -> None:
    """Write lines, each with its end."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
