"""Ways to an archive that are encrypted or need a token, with certificates of the test's own."""

import ssl
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import numpy as np
import pytest
from archive_proxy import proxy_before
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from dicom_files import sets, write_slices
from orthanc import free_port, running_orthanc

from medfedaug.hospital.pacs.archive import Access, ArchiveError, StudyQuery
from medfedaug.hospital.pacs.open_archive import open_archive

VOXELS = np.zeros((8, 8, 2), np.int16)


def write_pair(folder, name, issuer=None):
    """A certificate for 127.0.0.1 and its key, in files; of an authority where ``issuer`` is ``None``."""
    key, now = rsa.generate_private_key(65537, 2048), datetime.now(timezone.utc)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, signed_by = issuer or (key, subject)
    host = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signed_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=9))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(host, critical=False)
        .sign(signer, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    form = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (folder / f"{name}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return key, subject


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    authority = write_pair(folder, "authority")
    for name in ("archive", "site"):
        write_pair(folder, name, authority)
    write_pair(folder, "stranger", write_pair(folder, "other"))
    return folder


@pytest.fixture(scope="module")
def encrypted(files, tmp_path_factory):
    """An archive that speaks TLS alone, wants a certificate by DIMSE, and holds one study."""
    root = tmp_path_factory.mktemp("encrypted")
    port = free_port()
    own = {"AET": "MEDFEDAUG", "Host": "127.0.0.1", "Port": port, "UseDicomTls": True}
    settings = {
        "DicomTlsEnabled": True,
        "DicomTlsCertificate": str(files / "archive.crt"),
        "DicomTlsPrivateKey": str(files / "archive.key"),
        "DicomTlsTrustedCertificates": str(files / "authority.crt"),
        "DicomTlsRemoteCertificateRequired": True,
        "DicomModalities": {"medfedaug": own},
    }
    write_slices(root / "in", VOXELS, change=sets(PatientID="TLS"))
    with running_orthanc(root / "archive", **settings) as started:
        started.put(root / "in")
        started.receive = port
        yield started


@pytest.mark.parametrize("move", [False, True])
def test_dimse_with_tls_fetches_both_ways(encrypted, files, tmp_path, move):
    own = {"certificate": files / "site.crt", "key": files / "site.key", "authority": files / "authority.crt"}
    access = Access(timeout=10, tls=True, receive=encrypted.receive if move else None, **own)
    with open_archive(dimse=encrypted.dimse, access=access) as archive:
        (study,) = archive.find_studies(StudyQuery("PatientID", "TLS"))
        (series,) = archive.find_series(study)
        assert len(archive.fetch(series, tmp_path)) == 2


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"authority": "other.crt"}, "an archive of another authority"),
        ({"certificate": "stranger.crt", "key": "stranger.key"}, "a site that the archive does not know"),
        ({"tls": False}, "no encryption"),
    ],
)
def test_dimse_with_tls_is_refused_to(encrypted, files, changed, reason):
    own = {"certificate": "site.crt", "key": "site.key", "authority": "authority.crt", "tls": True, **changed}
    options = {name: files / value if isinstance(value, str) else value for name, value in own.items()}
    archive = open_archive(dimse=encrypted.dimse, access=Access(timeout=3, **options))
    with archive, pytest.raises(ArchiveError, match="cannot be reached"):
        archive.find_studies(StudyQuery("PatientID", "TLS"))


def test_dicomweb_with_tls_and_a_client_certificate(run, orthanc, files, tmp_path, monkeypatch):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files / "authority.crt")
    context.load_cert_chain(files / "archive.crt", files / "archive.key")
    context.verify_mode = ssl.CERT_REQUIRED
    (tmp_path / "studies.csv").write_text("PatientID\nNOBODY\n")
    # The authority that is named counts, whatever the environment says.
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files / "other.crt"))
    with proxy_before(orthanc.dicomweb, context) as proxy:
        choice = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "site", "--dry-run")
        call = ("import", "--dicomweb", proxy.url, *choice, "--timeout", 5)
        own = ("--certificate", files / "site.crt", "--key", files / "site.key")
        trusted = ("--authority", files / "authority.crt")
        out = run.ok(*call, *own, *trusted)
        assert "no such study" in " ".join(out.split())
        for options, output in (
            (own, "its certificate is not trusted; name its authority with --authority FILE"),
            (trusted, "refuses the encryption; where it wants a certificate, give --certificate and --key"),
        ):
            code, _, err = run(*call, *options)
            assert code != 0
            assert output in " ".join(err.split())


def test_a_token_comes_from_the_environment(run, orthanc, tmp_path, monkeypatch):
    (tmp_path / "studies.csv").write_text("PatientID\nNOBODY\n")
    monkeypatch.setenv("MEDFEDAUG_PACS_TOKEN", "of-the-environment")
    with proxy_before(orthanc.dicomweb) as proxy:
        choice = ("--studies", tmp_path / "studies.csv", "--out", tmp_path / "site", "--dry-run")
        call = ("import", "--dicomweb", proxy.url, *choice)
        texts = run(*call)
        assert {*proxy.authorised} == {"Bearer of-the-environment"}
        code, _, err = run(*call, "--user", "me")
        assert code != 0
        assert "a user and a token" in " ".join(err.split())
    assert not [text for text in (*texts, err) if "of-the-" in str(text)]
