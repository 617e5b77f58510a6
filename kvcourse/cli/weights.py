"""`kvcourse weights`: list, fetch and verify the models of the course."""

from kvcourse import weights
from kvcourse.cli import CommandError


def main(args):
    """Run one of list, fetch, verify; returns the exit status."""
    return {"list": list_models, "fetch": fetch, "verify": verify}[args.action](args)


def list_models(args):
    """Print one line a model: name, size, where it lies."""
    models = weights.available()
    width = max(map(len, models))
    for name, model in models.items():
        place = str(model.folder) if model.folder else f"not here yet: kvcourse weights fetch {name}"
        kind = "bundled" if model.bundled else "fetched" if model.folder else "to fetch"
        print(f"{name:<{width}}  {model.size / 1e6:6.1f} MB  {kind:<8}  {place}")


def fetch(args):
    """Download what is missing or damaged of one model; print its folder."""
    print(f"{args.name}: whole, in {weights.fetch(_known(args.name))}")


def verify(args):
    """Check the named models, or all on this machine, a line each; status 1 when one is damaged."""
    models = weights.available()
    names = [_known(name) for name in args.names] or [n for n, m in models.items() if m.folder or m.bundled]
    damaged = 0
    for name in names:
        try:
            print(f"{name}: whole, in {weights.verify(name)}")
        except weights.fetching.DamagedFile as error:
            damaged += 1
            print(f"{name}: {error}")
    return 1 if damaged else 0


def _known(name):
    models = weights.available()
    if name not in models:
        raise CommandError(f"no model {name!r}: the course knows {', '.join(models)}")
    return name
