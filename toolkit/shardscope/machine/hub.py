"""Checks whether the Hugging Face Hub serves a repository, with one request.

``huggingface_hub`` and ``datasets`` repeat a failing request for 23 seconds, which is long for a mistyped
name on a machine without a network.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardscope.core.errors import get_first_line

TIMEOUT_SECONDS = 5.0
NAMES = {"model": "model", "dataset": "data set"}


@dataclass(frozen=True)
class HubProblem:
    """The reason why a repository cannot be read, and the nearest fix."""

    reason: str
    fix: str
    is_unreachable: bool = False
    """Whether the Hub did not answer at all: it may have the repository."""


def find_hub_problem(repo_id: str, file: str, repo_type: Literal["model", "dataset"]) -> HubProblem | None:
    """Return why ``file`` of a model, or a data set with or without it, cannot be read; None if it can.

    Requires huggingface_hub. One request, of at most 5 seconds to connect and as many to answer.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    endpoint, name = constants.ENDPOINT, NAMES[repo_type]
    not_found = HubProblem(
        f"the Hub ({endpoint}) has no {name} {repo_id!r} that this login may read",
        "check the spelling, or `hf auth login` for a private one",
    )
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, file, repo_type=repo_type), timeout=TIMEOUT_SECONDS)
    except GatedRepoError:  # Before its base class RepositoryNotFoundError.
        folder = "datasets/" if repo_type == "dataset" else ""
        return HubProblem(
            f"the {name} {repo_id!r} is gated",
            f"accept its terms on {endpoint}/{folder}{repo_id}, then `hf auth login`",
        )
    except RepositoryNotFoundError:
        return not_found
    except EntryNotFoundError:
        if repo_type == "dataset":  # Of a data set, any file shows that it is there, README.md too.
            return None
        return HubProblem(f"the {name} {repo_id!r} of the Hub has no {file}", f"a repository with {file}")
    except HfHubHTTPError as error:
        # For a repository that is not there, the Hub answers 401 to requests without a login.
        if error.response.status_code in (401, 403, 404):
            return not_found
        return HubProblem(f"the Hub ({endpoint}) answers {error.response.status_code}", "try again later")
    except HFValidationError as error:
        return HubProblem(str(error).splitlines()[0], "a name like org/name")
    except OfflineModeIsEnabled:
        return HubProblem("HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE", is_unreachable=True)
    except Exception as error:  # Of the HTTP library, which differs between versions of huggingface_hub.
        detail = get_first_line(error)
        return HubProblem(
            f"the Hub ({endpoint}) cannot be reached: {detail}",
            "check the network, or HF_ENDPOINT for a mirror",
            is_unreachable=True,
        )
    return None
