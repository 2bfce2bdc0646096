"""Secure aggregation between hospitals with certificates, and a server with keys of its own."""

from dataclasses import dataclass

import pytest
import reference
from hospitals import Deployment, Hospital
from nvflare.lighter.utils import serialize_cert
from secure_project import SERVER, SITES, Project, write_kit

from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation.messages.messages import MASKED, SHARES, TRAIN
from medfedaug.hospital.primitives import KeyPair
from medfedaug.hospital.secure.agreement import PublicKeys
from medfedaug.hospital.secure.identity import Certificates
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.nvflare_jobs.job.executor import kit_identity
from medfedaug.simulate import configure


@pytest.fixture(scope="module")
def project() -> Project:
    return Project()


@pytest.fixture(scope="module")
def issued(project):
    roles = {"C": "client"}  # as a certificate of `medfedaug enrol` has it
    return {name: project.issue(name, roles.get(name)) for name in (*SITES, SERVER)}


@pytest.fixture
def deploy(make_photos, tmp_path, monkeypatch, project, issued):
    """Three hospitals with kits, and a job: `server, deployment = deploy(min_summed=2, secure=True)`."""
    monkeypatch.setitem(networks._NETWORKS, "reference_linear", reference.linear)
    for name in SITES:
        make_photos(name, 5, size=8)
        write_kit(tmp_path / "kits" / name, *issued[name], project.root)

    def run(deployment=Deployment, secure=True, min_sites=3, methods="fedavg", privacy=None, **rules):
        config = configure(
            find_sites(tmp_path / "photos"),
            methods=tuple(parse_methods(methods)),
            **{"network": "reference_linear", "rounds": 1, "batch_size": 6, "secure_aggregation": secure},
        )
        hospitals = [
            Hospital(
                *(tmp_path / "kits" / name, tmp_path / "photos" / name),
                privacy={"min_images": 1, **(privacy or {})},
                jobs=rules,
            )
            for name in SITES
        ]
        made = deployment(hospitals)
        return made.run(config, min_sites), made

    return run


def sent(deployment):
    return [reply for _, reply in deployment.replies if reply.task == TRAIN and not reply.error]


def test_hospitals_with_certificates_train_together_and_their_ledgers_have_what_left(deploy, run, tmp_path):
    server, deployment = deploy()
    assert server.rounds[0]["methods"]["masks"]["summed"] == list(SITES)
    assert all(set(reply.masks) == {MASKED} and not reply.weights for reply in sent(deployment))
    assert not any("train_loss" in reply.metrics for reply in sent(deployment))
    code, out, err = run("site", "ledger", tmp_path / "kits/A")
    assert code == 0, err
    for words in (
        "model masked weights and statistics: 386 numbers",
        "masks keys",
        "masks shares",
        "masks open",
    ):
        assert words in " ".join(out.split())
    assert "model weights" not in out


@dataclass
class Agreed:
    """A training of which the server knows no more than the hash that all sites signed."""

    digest: bytes


class Between(Deployment):
    """A server with keys of its own in the place of B's, as far as A and C are told."""

    swap = staticmethod(lambda message, told: {})

    def ask(self, request, sites, needed, accept):
        if request.task == SHARES:
            self.mine = KeyPair(), KeyPair()
            keys = PublicKeys(*(pair.public for pair in self.mine))
            message = keys.message(Agreed(request.masks["keys"]["B"]["agreed"]), "B")
            sent = {**request.masks["keys"]["B"], "cipher": keys.cipher, "mask": keys.mask}
            del sent["certificate"], sent["signature"]
            signed = self.swap(message, request.masks["keys"]["B"])
            request.masks["keys"] = {**request.masks["keys"], "B": {**sent, **signed}}
        return super().ask(request, sites, needed, accept)


@pytest.fixture
def forged(project, issued):
    """What a server may send as the signature of its keys, by what it has."""
    foreign = Project("another")

    def by(key, certificate):
        from medfedaug.hospital.secure.identity import _PADDING, SHA256

        return lambda message, told: {
            "certificate": serialize_cert(certificate),
            "signature": key.sign(message, _PADDING, SHA256()),
        }

    return {
        "nothing": lambda message, told: {},
        "B's signature of other keys": lambda message, told: {
            name: told[name] for name in ("certificate", "signature")
        },
        "the server's certificate": by(*issued[SERVER]),
        "another site's certificate": by(*issued["C"]),
        "an administrator's certificate in B's name": by(*project.issue("B", role="project_admin")),
        "a certificate of another root": by(*foreign.issue("B")),
        "an expired certificate": by(*project.issue("B", days=-20)),
        "a certificate of tomorrow": by(*project.issue("B", days=1)),
    }


FORGED = {
    "nothing": "the keys of site B are not signed",
    "B's signature of other keys": "the keys of site B have a signature that is not theirs",
    "the server's certificate": "certificate that names another site",
    "another site's certificate": "certificate that names another site",
    "an administrator's certificate in B's name": "certificate that names another site",
    "a certificate of another root": "certificate that the project's root has not issued",
    "an expired certificate": "the certificate of site B has expired, or is not valid yet",
    "a certificate of tomorrow": "the certificate of site B has expired, or is not valid yet",
}


def test_a_server_cannot_put_its_own_keys_in_the_place_of_a_sites(deploy, forged):
    assert forged.keys() == FORGED.keys()
    for what, words in FORGED.items():
        made = []

        class Now(Between):
            swap = staticmethod(forged[what])

            def __init__(self, hospitals, made=made):
                super().__init__(hospitals)
                made.append(self)

        with pytest.raises(RunFailed, match=words):
            deploy(Now)
        (deployment,) = made
        assert not sent(deployment), what
        # B itself sees that other keys than its own were passed on.
        assert any("passed on other keys" in line for line in deployment.hospitals["B"].logged)


def test_the_servers_own_certificate_makes_it_no_site(deploy, project, issued, tmp_path):
    write_kit(tmp_path / "intruder", *issued[SERVER], project.root)
    own = Certificates(
        *(tmp_path / "intruder/startup" / f for f in ("client.crt", "client.key", "rootCA.pem"))
    )
    keys = PublicKeys(KeyPair().public, KeyPair().public)
    message = keys.message(Agreed(bytes(32)), SERVER)
    # To its own eyes it is one, since the certificate is in order.
    own.check(SERVER, message, own.sign(message))
    for name in SITES:
        with pytest.raises(
            Exception, match=f"keys of site {SERVER} came with a certificate that names another site"
        ):
            kit_identity(tmp_path / "kits" / name).check(SERVER, message, own.sign(message))


def test_a_site_says_how_many_sites_are_in_a_sum_and_whether_jobs_must_be_under_masks(deploy):
    with pytest.raises(RunFailed, match="there are keys of 3 sites, and 4 are needed"):
        deploy(min_summed=4)
    rule = "its secure_aggregation is false, and the site's rule secure_only is true"
    with pytest.raises(RunFailed, match=rule):
        deploy(secure=False, secure_only=True)
    server, _ = deploy(secure_only=True)
    assert server.round == 1


class Vanishing(Deployment):
    def ask(self, request, sites, needed, accept):
        gone = {"C"} if request.task == TRAIN else set()
        silent = super().ask(request, [name for name in sites if name not in gone], needed, accept)
        return {**silent, **{name: f"site {name} did not answer" for name in gone & set(sites)}}


def test_a_sum_of_two_is_opened_only_where_every_site_of_it_allows_that(deploy):
    with pytest.raises(RunFailed, match=r"there are numbers of 2 sites, and 3 are needed|0 sites opened"):
        deploy(Vanishing, min_sites=2)
    server, _ = deploy(Vanishing, min_sites=2, min_summed=2)
    assert server.rounds[0]["methods"]["masks"]["summed"] == ["A", "B"]


def test_a_site_without_certificates_sends_nothing_and_says_which_file_is_missing(deploy, tmp_path):
    (tmp_path / "kits/B/startup/client.key").unlink()
    with pytest.raises(RunFailed, match="site B: secure aggregation: …: cannot be read"):
        deploy()
    with pytest.raises(ConfigError, match="provision the kit again"):
        kit_identity(tmp_path / "kits/B")
