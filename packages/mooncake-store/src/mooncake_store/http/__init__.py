"""The store over HTTP: objects, numbers, metrics and a page; needs the extra ``rest``.

``app`` is the ASGI application, ``server`` runs it, as do ``mooncake store master --http-port`` and
``mooncake store rest``.
"""
