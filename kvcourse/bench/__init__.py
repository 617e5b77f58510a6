"""Benches behind `kvcourse bench NAME`. Only they write recorded runs; `kvcourse.measure` reads them."""
