"""Wrong answers to the exercise of chapter 11, and words of the line that must name each."""

import torch


def _first_version(make, batches):
    found = {}
    for batch in batches:
        try:
            rows = make(batch)
            found[batch] = rows.nbytes
        except torch.OutOfMemoryError as error:
            found[batch] = error
    return found


def _keeps_the_errors(make, batches):
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes
        except torch.OutOfMemoryError as error:
            found[batch] = error
    return found


def _writes_down_the_message(make, batches):
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes
        except torch.OutOfMemoryError as error:
            found[batch] = str(error)
    return found


def _goes_on_within_the_clause(make, batches):
    if not batches:
        return {}
    try:
        found = {batches[0]: make(batches[0]).nbytes}
    except torch.OutOfMemoryError:
        return {batches[0]: None} | _goes_on_within_the_clause(make, batches[1:])
    return found | _goes_on_within_the_clause(make, batches[1:])


def _stops_at_the_first(make, batches):
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes
        except torch.OutOfMemoryError:
            found[batch] = None
            break
    return found


def _leaves_failed_ones_out(make, batches):
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes
        except torch.OutOfMemoryError:
            continue
    return found


def _says_only_whether(make, batches):
    found = {}
    for batch in batches:
        try:
            found[batch] = make(batch) is not None
        except torch.OutOfMemoryError:
            found[batch] = False
    return found


def _leaves_a_circle(make, batches):
    found, held = {}, []
    for batch in batches:
        try:
            found[batch] = make(batch).nbytes
        except torch.OutOfMemoryError as error:
            found[batch] = None
            if batch == batches[-1]:
                held.append(error)
    return found


def _lists(make, batches):
    found = []
    for batch in batches:
        try:
            found.append(make(batch).nbytes)
        except torch.OutOfMemoryError:
            found.append(None)
    return found


WRONG = {
    "11.sweep": [
        (_first_version, "the rows of 200 still have a name"),
        (_keeps_the_errors, "the error of make(512) is kept, and its traceback holds half-made rows. Write"),
        (_writes_down_the_message, "expected None, got"),
        (_goes_on_within_the_clause, "you call make within the except clause"),
        (lambda make, batches: {batch: make(batch).nbytes for batch in batches}, "ended your loop"),
        (_stops_at_the_first, "make(256) was never called"),
        (_leaves_failed_ones_out, "batch 512 is missing"),
        (_says_only_whether, "got True (bool)"),
        (_leaves_a_circle, "That is a circle"),
        (_lists, "return a dict"),
    ]
}
