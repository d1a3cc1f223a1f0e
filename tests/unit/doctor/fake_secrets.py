"""Secrets of every kind that `redact` knows, made up while the tests run: no scanner finds one in this repository."""

from __future__ import annotations

import base64
import random
import string
from dataclasses import dataclass

_random = random.Random(7)
LETTERS = string.ascii_letters + string.digits


def made_up(length: int, alphabet: str = LETTERS) -> str:
    return "".join(_random.choices(alphabet, k=length - 2)) + ("e7" if "e" in alphabet else "E7")  # has a digit


@dataclass(frozen=True)
class Planted:
    kind: str
    secret: str
    text: str  # with the secret in it
    kept: str = ""  # a part of the text that a reader needs

    def __str__(self) -> str:
        return self.kind


def planted(kind: str, secret: str, text: str, kept: str = "") -> Planted:
    assert "{}" in text
    return Planted(kind, secret, text.replace("{}", secret), kept)


def private_key(kind: str = "RSA ", lines: int = 12) -> tuple[list[str], str]:
    """The lines of a PEM block between its first and last, and the block."""
    body = [made_up(64, LETTERS + "+/") for _ in range(lines)]
    dashes = "-" * 5
    return body, "\n".join(
        [f"{dashes}BEGIN {kind}PRIVATE KEY{dashes}", *body, f"{dashes}END {kind}PRIVATE KEY{dashes}"]
    )


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def jwt() -> str:
    return ".".join(["ey" + "J" + made_up(30), "ey" + "J" + made_up(60), made_up(43, LETTERS + "-_")])


HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits

NAMED = [
    planted("variable", made_up(20), "HF_TOKEN={} python train.py --lr 3e-4", "HF_TOKEN="),
    planted(
        "exported variable", made_up(20), "export AWS_SECRET_ACCESS_KEY={} && python train.py", "&& python train.py"
    ),
    planted("quoted variable", "correct horse q7", "export DB_PASSWORD='{}' ; make", "DB_PASSWORD"),
    planted("line of env", "correct horse q7", "MY_SECRET={}", "MY_SECRET="),
    planted("JSON", made_up(12), '{"lr": 0.1, "api_key": "{}", "batch": 32}', '"batch": 32'),
    planted("JSON with a quote", 'ab\\"cd q7', '{"password": "{}", "batch": 32}', '"batch": 32'),
    planted("Python", made_up(12), "{'lr': 0.1, 'passwd': '{}', 'batch': 32}", "'batch': 32"),
    planted("YAML", "correct horse battery q7", "  password: {}", "password:"),
    planted("YAML with a comment", made_up(9), "  password: {}    # the caller", "# the caller"),
    planted("flow YAML", made_up(9), "env: {WANDB_API_KEY: {}, NCCL_DEBUG: INFO}", "NCCL_DEBUG: INFO"),
    planted("option", made_up(9), "train.py --auth-token {} --lr 3e-4", "--lr 3e-4"),
    planted("option with =", made_up(9), "train.py --api-key={} --lr 3e-4", "--lr 3e-4"),
    planted("quoted option", "it'\"'\"'s q7", "train.py --password '{}' --lr 3e-4", "--lr 3e-4"),
    planted("arguments", made_up(9), '["train.py", "--token", "{}", "--lr", "3e-4"]', '"--lr", "3e-4"'),
    planted("arrow", made_up(9), "'client_secret' => '{}', 'lr' => 1", "'lr' => 1"),
    planted("XML", made_up(9), "<user>me</user><password>{}</password>", "<user>me</user>"),
    planted("XML attributes", made_up(9), '<property name="dbPassword" value="{}"/>', "dbPassword"),
    planted("Kubernetes variable", made_up(9), '{"name": "SMTP_PASS", "value": "{}"}', "SMTP_PASS"),
    planted("access to environ", made_up(9), "os.environ['SESSION_ID'] = '{}'", "SESSION_ID"),
    planted("tuple", made_up(9), "[('authorization', '{}'), ('accept', '*/*')]", "'accept'"),
    planted("words", f"{made_up(5, UPPER)}-{made_up(5, UPPER)}", "License key: {}", "License key: "),
    planted("header", made_up(30), 'curl -H "Authorization: Bearer {}" https://host/', "https://host/"),
    planted("header in a log", made_up(30), "DEBUG > X-Api-Key: {}", "X-Api-Key"),
    planted("cookie", made_up(30), "Cookie: lang=en; sid={}; theme=dark", "Cookie: "),
    planted("escaped JSON", made_up(12), '{"text": "{\\"private_key\\": \\"{}\\", \\"step\\": 3}"}', "step"),
    planted("colors", made_up(12), "\x1b[31mpassword\x1b[0m=\x1b[1m{}\x1b[0m", "password="),
    planted(
        "Azure connection", made_up(40) + "==", "DefaultEndpoints=https;AccountName=x;AccountKey={}", "AccountName=x"
    ),
    planted("Dockerfile", made_up(12), "ENV GITLAB_TOKEN {}", "GITLAB_TOKEN"),
    planted("signature", made_up(24), "signature={}, algorithm=hmac", "signature="),
    planted("docker config", encoded(f"me:{made_up(12)}"), '{"auths": {"ghcr.io": {"auth": "{}"}}}', "ghcr.io"),
]

PLACED = [
    planted("user in a URL", made_up(12), "cloning https://me:{}@github.com/org/repo.git", "@github.com/org/repo.git"),
    planted("token in a URL", made_up(20), "cloning https://{}@github.com/org/repo.git", "@github.com/org/repo.git"),
    planted("database", "p@ss/w:rd!q7", "postgresql://me:{}@db.internal:5432/runs", "db.internal:5432/runs"),
    planted("login without scheme", made_up(12), "dsn me:{}@tcp(db:3306)/runs", "@tcp(db:3306)/runs"),
    planted("query", made_up(20), "GET https://host/data?a=1&token={}&b=2", "&b=2"),
    planted("SAS", f"{made_up(20)}%2B{made_up(8)}%3D", "https://x.blob.core.windows.net/c?sv=2022&sig={}", "?sv=2022"),
    planted(
        "signed URL", made_up(64, HEX), "https://b.s3.amazonaws.com/k?X-Amz-Signature={}&X-Amz-Expires=60", "Expires=60"
    ),
    planted("encoded query", made_up(20), "https://host/login?next=%2Fa%3Ftoken%3D{}", "https://host/login"),
    planted("netrc", made_up(20), "machine api.wandb.ai login user password {}", "api.wandb.ai"),
    planted("netrc in lines", made_up(20), "machine host\n  login me\n  password {}\n", "login me"),
    planted("sshpass", made_up(12), "sshpass -p {} ssh host", " ssh host"),
    planted("arguments of sshpass", made_up(12), "['sshpass', '-p', '{}', 'ssh', 'host']", "'ssh', 'host'"),
    planted("mysql", made_up(12), "mysql -u root -p{} runs", " runs"),
    planted("curl", made_up(12), "curl -u me:{} https://host/", "https://host/"),
    planted("basic", encoded(f"me:{made_up(12)}"), "using Basic {} for host", " for host"),
    planted("W&B key", made_up(40, HEX), "wandb login {}", "wandb login"),
    planted("shadow", f"$6${made_up(8)}${made_up(86)}", "me:{}:19700:0:99999:7:::", ":19700:0:99999"),
    planted(
        "AWS pair", made_up(40, LETTERS + "+/"), f"keys {'AK' + 'IA'}{made_up(16, UPPER)} {{}} were used", "were used"
    ),
]

FORMATS = [
    planted(kind, secret, "failed with {} in it", "in it")
    for kind, secret in {
        "AWS": "AK" + "IA" + made_up(16, UPPER),
        "AWS session": "AS" + "IA" + made_up(16, UPPER),
        "GitHub": "gh" + "p_" + made_up(36),
        "GitHub OAuth": "gh" + "o_" + made_up(36),
        "GitHub app": "gh" + "s_" + made_up(36),
        "GitHub fine-grained": "github" + "_pat_" + made_up(22) + "_" + made_up(59),
        "GitLab": "gl" + "pat-" + made_up(20),
        "Hugging Face": "h" + "f_" + made_up(34),
        "OpenAI": "s" + "k-" + made_up(48),
        "OpenAI project": "s" + "k-proj-" + made_up(48, LETTERS + "-_"),
        "Anthropic": "s" + "k-ant-api03-" + made_up(93, LETTERS + "-_"),
        "Google": "AI" + "za" + made_up(35),
        "Google OAuth": "ya" + "29." + made_up(60, LETTERS + "-_"),
        "Slack": "xo" + "xb-" + made_up(12, "0123456789") + "-" + made_up(24),
        "Slack hook": f"https://hooks.{'slack'}.com/services/T{made_up(8, UPPER)}/B{made_up(8, UPPER)}/{made_up(24)}",
        "Stripe": "sk" + "_live_" + made_up(24),
        "npm": "np" + "m_" + made_up(36),
        "PyPI": "py" + "pi-AgE" + made_up(100, LETTERS + "-_"),
        "SendGrid": "S" + "G." + made_up(22) + "." + made_up(43),
        "Twilio": "S" + "K" + made_up(32, HEX),
        "JWT": jwt(),
        "NVIDIA": "nv" + "api-" + made_up(64, LETTERS + "-_"),
    }.items()
]

EVERY = [*NAMED, *PLACED, *FORMATS]
