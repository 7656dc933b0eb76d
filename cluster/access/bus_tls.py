"""TLS contexts of the token bus' two ends, made in each process: a context does not travel."""

import ssl

from hybridserve.cluster.access.options import BusTls


def listener_context(tls: BusTls) -> ssl.SSLContext:
    """Of the ingress' end. Raises ValueError when a file cannot be used."""
    return _context(tls, ssl.PROTOCOL_TLS_SERVER)


def sender_context(tls: BusTls) -> ssl.SSLContext:
    """Of the engine's end. Raises ValueError when a file cannot be used."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: BusTls, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # addresses of nodes come and go; that the authority signed it is what makes a peer a member
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"access.bus_tls: certfile {tls.certfile} and keyfile {tls.keyfile} cannot be used: {error}"
        ) from None
    try:
        context.load_verify_locations(tls.cafile)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"access.bus_tls: cafile {tls.cafile} cannot be used: {error}") from None
    return context
