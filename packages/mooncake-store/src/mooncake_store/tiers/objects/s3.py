"""Records as objects of an S3 bucket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from mooncake_store._errors import ConfigError, TierUnavailable
from mooncake_store.tiers.cipher import Secret, require_same
from mooncake_store.tiers.contract import Bytes, Gone, TierRoom
from mooncake_store.tiers.folder import IDENTITY_FILE, Identity, fresh_identity, known_identity
from mooncake_store.tiers.objects.tier import ObjectTier
from mooncake_store.tiers.workers import Workers

__all__ = ["S3Tier"]

PART_BYTES = 8 << 20  # S3 takes 5 MiB at least
ATTEMPTS = 4
MISSING = ("404", "NoSuchKey", "NotFound", "412", "PreconditionFailed")

log = logging.getLogger(__name__)


class S3Tier(ObjectTier):
    """A bucket of S3, or of a server that speaks it. Several processes may share it.

    It has no limit of its own: what is old is removed by a lifecycle rule of the bucket.
    """

    def __init__(
        self,
        bucket: str,
        *,
        prefix: str = "",
        endpoint: str | None = None,
        region: str | None = None,
        secret: Secret | None = None,
        workers: int = 32,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 30.0,
        on_gone: Gone | None = None,
    ) -> None:
        """Open it. Credentials come from where boto3 looks for them.

        Args:
            bucket: which is there already.
            prefix: begins the names of all objects, such as ``kv/``.
            endpoint: URL of the server; None: Amazon's.
            region: of the bucket; None: as boto3 finds it.
            secret: encrypts what is written; the same for all that share it.
            workers: requests under way at a time.
            connect_timeout_s, request_timeout_s: for one request; what may be tried again is, three times.

        Raises ConfigError (boto3 is not installed), TierUnavailable, TierKeyWrong.
        """
        place = _Bucket(
            _client(endpoint, region, workers, connect_timeout_s, request_timeout_s), bucket, prefix, workers
        )
        try:
            identity = place.identity(secret)
            require_same(secret, identity.secret, f"s3://{bucket}/{prefix}")
        except BaseException:
            place.close()
            raise
        super().__init__(identity.id, f"s3 tier {bucket}/{prefix}", place, secret, workers, on_gone)


def _client(
    endpoint: str | None, region: str | None, workers: int, connect_timeout_s: float, request_timeout_s: float
) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(
            f"the s3 tier needs the package boto3 ({error}); pip install mooncake-store[s3]"
        ) from error
    config = Config(
        connect_timeout=connect_timeout_s,
        read_timeout=request_timeout_s,
        retries={"max_attempts": ATTEMPTS, "mode": "standard"},
        max_pool_connections=2 * workers,
        # Records have checksums of their own; not every server knows the newer ones of S3.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.session.Session().client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"no client of S3 can be made for {endpoint or 'Amazon'}: {error}") from error


class _Bucket:
    """See :class:`ObjectPlace`."""

    def __init__(self, client: Any, bucket: str, prefix: str, workers: int) -> None:
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        # Of their own: a thread that waits for the parts of an object must not be one that moves them.
        self._parts = Workers(workers, "mooncake-store-tier-part")

    def identity(self, secret: Secret | None) -> Identity:
        """What it says of itself, which we say when nothing is in it. Raises TierUnavailable."""
        try:
            self._try(lambda: self._client.head_bucket(Bucket=self._bucket))
            found = self._fetch(self._prefix + IDENTITY_FILE)
            if found is None:
                fresh = fresh_identity("s3", secret)
                self._upload(self._prefix + IDENTITY_FILE, msgspec.json.encode(fresh))
                return fresh
            return known_identity(found.tobytes(), "s3", f"s3://{self._bucket}/{self._prefix}")
        except OSError as error:
            raise TierUnavailable(
                f"bucket {self._bucket!r} cannot be used as a tier: {error}; make it, or correct name, "
                "endpoint or credentials"
            ) from error

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """See :class:`ObjectPlace`."""
        body = np.concatenate(parts)
        if body.nbytes <= 2 * PART_BYTES:
            self._upload(self._prefix + name, body.data)
        else:
            self._upload_in_parts(self._prefix + name, body)

    def _upload(self, key: str, body: bytes | memoryview) -> None:
        self._try(lambda: self._client.put_object(Bucket=self._bucket, Key=key, Body=bytes(body)))

    def _upload_in_parts(self, key: str, body: Bytes) -> None:
        where = {"Bucket": self._bucket, "Key": key}
        begun = self._try(lambda: self._client.create_multipart_upload(**where))["UploadId"]

        def upload(number: int) -> dict[str, Any]:
            part = body[(number - 1) * PART_BYTES : number * PART_BYTES].tobytes()
            sent = self._client.upload_part(**where, UploadId=begun, PartNumber=number, Body=part)
            return {"ETag": sent["ETag"], "PartNumber": number}

        try:
            count = -(-body.nbytes // PART_BYTES)
            sent = self._in_parallel(upload, range(1, count + 1))
            whole = {"Parts": sent}
            self._try(
                lambda: self._client.complete_multipart_upload(**where, UploadId=begun, MultipartUpload=whole)
            )
        except OSError:
            # Else its parts would be kept, and paid for.
            self._try(lambda: self._client.abort_multipart_upload(**where, UploadId=begun))
            raise

    def get(self, name: str, most_bytes: int) -> Bytes | None:
        """See :class:`ObjectPlace`."""
        return self._fetch(self._prefix + name, most_bytes)

    def _fetch(self, key: str, most_bytes: int | None = None) -> Bytes | None:
        """All of it, the first part with one request, and the others, of the same version, at once."""
        first = self._range(key, 0, PART_BYTES)
        if first is None:
            return None
        data, total, version = first
        if most_bytes is not None and total > most_bytes:
            return None
        if total <= data.nbytes:
            return data
        whole = np.empty(total, dtype=np.uint8)
        whole[: data.nbytes] = data

        def fetch(start: int) -> None:
            found = self._range(key, start, PART_BYTES, version)
            if found is None or found[0].nbytes != min(PART_BYTES, total - start):
                raise OSError(f"{key} was replaced or removed while it was read")
            whole[start : start + found[0].nbytes] = found[0]

        self._in_parallel(fetch, range(data.nbytes, total, PART_BYTES))
        return whole

    def head(self, name: str, nbytes: int) -> Bytes | None:
        """See :class:`ObjectPlace`."""
        found = self._range(self._prefix + name, 0, nbytes)
        return None if found is None else found[0]

    def _range(
        self, key: str, start: int, nbytes: int, version: str | None = None
    ) -> tuple[Bytes, int, str] | None:
        """Some of an object, its size, and which version of it that is."""
        options = {} if version is None else {"IfMatch": version}
        asked = f"bytes={start}-{start + nbytes - 1}"

        def fetch() -> tuple[Bytes, int, str]:
            answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=asked, **options)
            with answer["Body"] as body:
                data = np.frombuffer(body.read(), dtype=np.uint8)
            total = answer.get("ContentRange", f"/{data.nbytes}").rpartition("/")[2]
            return data, int(total), answer["ETag"]

        found: tuple[Bytes, int, str] | None = self._try(fetch, missing=None)
        return found

    def delete(self, name: str) -> bool:
        """See :class:`ObjectPlace`."""
        where = {"Bucket": self._bucket, "Key": self._prefix + name}
        there = self._try(lambda: self._client.head_object(**where), missing=None) is not None
        if there:
            self._try(lambda: self._client.delete_object(**where))
        return there

    def quarantine(self, name: str) -> None:
        """See :class:`ObjectPlace`. It is removed; a bucket with versions keeps it."""
        self.delete(name)

    def names(self) -> Iterator[str]:
        """See :class:`ObjectPlace`."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix}
        while True:
            page = self._try(partial(self._client.list_objects_v2, **asked))
            for found in page.get("Contents", []):
                name = found["Key"].removeprefix(self._prefix)
                if len(name) == 32:
                    yield name
            if not page.get("IsTruncated"):
                return
            asked["ContinuationToken"] = page["NextContinuationToken"]

    def room(self) -> TierRoom:
        """See :class:`ObjectPlace`. Not known: it would have to be listed."""
        return TierRoom(0, 0, 0)

    def close(self) -> None:
        """See :class:`ObjectPlace`."""
        self._parts.close(1.0)
        self._client.close()

    def _in_parallel(self, call: Callable[[int], Any], items: range) -> list[Any]:
        pending = [self._parts.submit(partial(self._try, partial(call, item))) for item in items]
        return [future.result() for future in pending]

    def _try(self, call: Callable[[], Any], **missing: Any) -> Any:
        """What it returns, or ``missing`` where there is no such object. Raises OSError for all else."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return call()
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            if missing and code in MISSING:
                return missing["missing"]
            raise OSError(f"the server refused: {error}") from error
        except BotoCoreError as error:
            raise OSError(f"the server cannot be reached: {error}") from error
