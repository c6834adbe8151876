"""Stores trials in an Optuna study in a database, tied to the folder that holds their runs."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interp_tasks.checkpoints.run_config import differences
from interp_tasks.checkpoints.run_files import read_json
from interp_tasks.errors import UserError
from interp_tasks.pages import check_writable_file, write_atomically

if TYPE_CHECKING:
    from optuna import Study

#: What the search is, and the name that ties folder and storage together.
IDENTITY_FILE = "search.json"
STUDY = "interp-run search"
URL = re.compile(r"[a-z][a-z0-9_]*(\+[a-z0-9_]+)?://.*", re.DOTALL)
SQLITE = re.compile(r"sqlite(?:\+\w+)?://(.*)", re.DOTALL)
#: How long one process waits while another writes to the same SQLite file, in seconds.
WAIT = 120


def default_storage(out: Path) -> str:
    return f"sqlite:///{out / 'search.db'}"


def without_password(url: str) -> str:
    return re.sub(r"(://[^:@/]*):[^@/]*@", r"\1:***@", url)


def check_storage(url: str) -> None:
    """Refuses a text that is no database URL, or an unwritable SQLite file; creates nothing.

    Raises:
        UserError: in one line.
    """
    if not URL.fullmatch(url):
        raise UserError(
            f"--storage {without_password(url)!r} is no URL of a database: write sqlite:///FILE.db, or "
            "postgresql://USER:PASSWORD@HOST/NAME"
        )
    sqlite = SQLITE.fullmatch(url)
    if sqlite is None:
        return
    path = sqlite[1].removeprefix("/").partition("?")[0]
    if not sqlite[1].startswith("/") or path in ("", ":memory:"):
        raise UserError(f"--storage {url} would be forgotten: write sqlite:///FILE.db, with three slashes")
    check_writable_file(Path(path))


def check_reachable(url: str) -> None:
    """Refuses a database that cannot be connected to; makes nothing.

    Raises:
        UserError: in one line.
    """
    from sqlalchemy import create_engine
    from sqlalchemy.exc import SQLAlchemyError

    sqlite = SQLITE.fullmatch(url)
    if sqlite is not None and not Path(sqlite[1].removeprefix("/").partition("?")[0]).exists():
        return
    try:
        engine = create_engine(url)
        try:
            with engine.connect() as connection:
                # Connecting alone does not look into a file.
                connection.exec_driver_sql("select 1" if sqlite is None else "pragma schema_version")
        finally:
            engine.dispose()
    except (ImportError, ValueError, RuntimeError, SQLAlchemyError) as error:
        raise UserError(f"--storage {without_password(url)} cannot be opened: {reason(error)}") from None


@contextlib.contextmanager
def opened(url: str, out: Path, identity: Mapping[str, Any]) -> Iterator[Study]:
    """Opens the study of a search: a new one, or the one that this folder belongs to.

    Raises:
        UserError: in one line, for a storage that cannot be opened, and for a folder or a storage that holds
            another search. Nothing is changed then.
    """
    import optuna
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import SQLAlchemyError

    shown = f"--storage {without_password(url)}"
    name, is_new = folder_name(out, identity)
    if SQLITE.fullmatch(url):
        Path(url.partition(":///")[2].partition("?")[0]).parent.mkdir(parents=True, exist_ok=True)
    try:
        storage = RDBStorage(
            url, engine_kwargs={"connect_args": {"timeout": WAIT}} if SQLITE.fullmatch(url) else None
        )
    except (ImportError, ValueError, RuntimeError, SQLAlchemyError, StorageInternalError) as error:
        raise UserError(f"{shown} cannot be opened: {reason(error)}") from None
    try:
        names = {
            summary.study_name
            for summary in optuna.get_all_study_summaries(storage, include_best_trial=False)
        }
        if STUDY in names:
            study = optuna.load_study(study_name=STUDY, storage=storage)
            check_same(study.user_attrs, identity, name, shown, out)
        elif not is_new and any(out.glob("trial-*")):
            raise UserError(
                f"{out} holds trials that {shown} knows nothing of: name their storage, or choose another --out"
            )
        else:
            study = optuna.create_study(
                storage=storage, study_name=STUDY, direction=identity["objective"]["direction"]
            )
        if is_new:
            write_atomically(out / IDENTITY_FILE, json.dumps({"name": name, **identity}, indent=1) + "\n")
        if "name" not in study.user_attrs:
            study.set_user_attr("search", dict(identity))
            study.set_user_attr("name", name)
        yield study
    except (StorageInternalError, SQLAlchemyError) as error:
        raise UserError(f"{shown}: {reason(error)}") from None
    finally:
        storage.remove_session()
        storage.engine.dispose()


def folder_name(out: Path, identity: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the name in a folder's ``search.json``, or a new one and ``True``.

    Raises:
        UserError: if the folder holds another search, naming what differs.
    """
    if not (out / IDENTITY_FILE).exists():
        if any(out.glob("trial-*")):
            raise UserError(f"{out} holds trials but no {IDENTITY_FILE}: choose another --out")
        return uuid.uuid4().hex, True
    stored = read_json(out / IDENTITY_FILE, "what is searched")
    refuse_other(str(out), {key: value for key, value in stored.items() if key != "name"}, identity, "--out")
    return str(stored.get("name")), False


def check_same(
    stored: Mapping[str, Any], identity: Mapping[str, Any], name: str, shown: str, out: Path
) -> None:
    if "search" in stored:
        refuse_other(shown, stored["search"], identity, "--storage")
    if stored.get("name", name) != name:
        raise UserError(f"{shown} records the trials of another folder than {out}: give that as --out")


def refuse_other(place: str, stored: Mapping[str, Any], wanted: Mapping[str, Any], option: str) -> None:
    differing = differences(stored, json.loads(json.dumps(wanted)))
    if differing:
        listed = "; ".join(
            f"{key}: {old!r} there, {new!r} asked for" for key, (old, new) in differing.items()
        )
        raise UserError(f"{place} holds another search ({listed}): choose another {option}")


def reason(error: Exception) -> str:
    """Returns a database's own reason for a refusal."""
    cause = getattr(error, "orig", None) or error.__cause__ or error
    cause = getattr(cause, "orig", None) or cause
    return without_password(" ".join(str(cause).split()))[:200] or type(cause).__name__
