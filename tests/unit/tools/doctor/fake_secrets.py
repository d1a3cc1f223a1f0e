"""Secrets of many kinds, made up from a seed while the tests run: no scanner finds one in this repository.

In a form, `{L20}` stands for 20 letters and digits, `{A…}` for lowercase letters, `{U…}` for uppercase letters and
digits, `{H…}` for hex digits, `{D…}` for digits, `{B…}` for letters of base64, and `{W4}` for four words. `~` is left
out.
"""

from __future__ import annotations

import base64
import random
import re
import string
from dataclasses import dataclass

LETTERS = string.ascii_letters + string.digits
ALPHABETS = {
    "L": LETTERS,
    "A": string.ascii_lowercase,
    "U": string.ascii_uppercase + string.digits,
    "H": "0123456789abcdef",
    "D": string.digits,
    "B": LETTERS + "+/",
}
WORDS = [
    "horse", "battery", "staple", "giraffe", "tulip", "walnut", "pepper", "violin", "cactus", "orchid", "falcon",
    "marble", "copper", "velvet", "thunder", "lemon", "saddle", "penguin", "biscuit", "harbor", "candle", "meadow",
    "turnip", "whisker", "puddle", "sparrow", "cinnamon", "gravel", "blanket", "kettle",
]  # fmt: skip

# Where a secret stands in a text, besides the forms of the kinds: `{}` is the secret.
ANYWHERE = [
    "{}",
    "failed with {} in it",
    "using {}",
    "password: {}",
    "the password is {}",
    "ValueError: bad value {}",
    "KeyError: '{}'",
    "RuntimeError: cannot log in as ada with {}: rejected",
    "warning: ignoring {}",
    "[rank1]: PermissionError: [Errno 13] Permission denied: '/data/{}'",
    "step 12 | loss 2.5 | {}",
    "node-1:1234:1240 [0] NCCL INFO {}",
    '  File "/work/{}/train.py", line 12, in main',
    "    client = Client('{}')",
    "GET https://ada:{}@host/x",
    "https://host/x?a={}&b=2",
    "redis://{}@10.0.0.7:6379/0",
    "config.{}=3",
    "--{} 3",
    "--lr {}",
    "lr: {}",
    "model={}",
    "Passwort: {}",
    "contraseña = {}",
    "mot de passe : {}",
    "пароль: {}",
    "密码：{}",
    "パスワード {}",
    "heslo={}",
    "wachtwoord {}",
    '{"text": "{}"}',
    "<input name='pw' value='{}'>",
    "x{}y",
    "/tmp/{}/{}.py",
]

KINDS = {
    "AWS key": ("AK~IA{U16}", "keys {}"),
    "AWS secret": ("{B40}", "aws_secret_access_key = {}"),
    "GitHub": ("gh~p_{L36}", "export GH={}"),
    "GitHub fine-grained": ("github~_pat_{L22}_{L59}", "git clone https://{}@github.com/org/repo"),
    "GitLab": ("gl~pat-{L20}", "GITLAB {}"),
    "Hugging Face": ("h~f_{L34}", "login(token='{}')"),
    "OpenAI": ("s~k-proj-{L48}", "openai.api_key = '{}'"),
    "Anthropic": ("s~k-ant-api03-{L60}", "x-api-key: {}"),
    "Google": ("AI~za{L35}", "?key={}"),
    "Google OAuth": ("ya~29.{L60}", "Bearer {}"),
    "Slack": ("xo~xb-{D12}-{L24}", "slack {}"),
    "Slack hook": ("T{U8}/B{U8}/{L24}", "https://hooks.slack~.com/services/{}"),
    "Discord hook": ("{D18}/{L60}", "https://discord~.com/api/webhooks/{}"),
    "Stripe": ("sk~_live_{L24}", "stripe.key={}"),
    "npm": ("np~m_{L36}", "//registry.npmjs.org/:_authToken={}"),
    "PyPI": ("py~pi-AgE{L80}", "twine upload -p {}"),
    "SendGrid": ("S~G.{L22}.{L43}", "sendgrid {}"),
    "Twilio": ("S~K{H32}", "twilio: {}"),
    "Twilio account": ("A~C{H32}:{H32}", "curl -u {} https://api"),
    "Telegram": ("{D10}:AA{L33}", "bot {}"),
    "Linear": ("lin~_api_{L40}", "linear {}"),
    "Notion": ("nt~n_{L46}", "notion {}"),
    "Notion, older": ("sec~ret_{L43}", "notion {}"),
    "Figma": ("fig~d_{L40}", "X-Figma: {}"),
    "Heroku": ("{H8}-{H4}-{H4}-{H4}-{H12}", "heroku {}"),
    "Datadog": ("{H32}", "DD_API={}"),
    "W&B": ("{H40}", "wandb login {}"),
    "Shopify": ("shp~at_{H32}", "shopify {}"),
    "Mailgun": ("key~-{D2}{H30}", "mailgun {}"),
    "DigitalOcean": ("dop~_v1_{H64}", "doctl {}"),
    "Terraform": ("{L14}.atlas~v1.{L60}", "credentials {}"),
    "Vault": ("hv~s.{L24}", "VAULT {}"),
    "Databricks": ("dap~i{H32}", "databricks {}"),
    "NVIDIA": ("nv~api-{L64}", "ngc {}"),
    "Docker Hub": ("dckr~_pat_{L27}", "docker login -u me -p {}"),
    "Tailscale": ("tske~y-auth-{L16}-{L32}", "tailscale up --key {}"),
    "Azure": ("{B86}==", "DefaultEndpoints=https;AccountName=x;AccountKey={}"),
    "SAS": ("{L20}%2B{L8}%3D", "https://x.blob.core.windows.net/c?sv=2022&sig={}"),
    "signed URL": ("{H64}", "https://b.s3.amazonaws.com/k?X-Amz-Signature={}&X-Amz-Expires=60"),
    "JWT": ("ey~J{L30}.ey~J{L60}.{L43}", "Authorization: Bearer {}"),
    "basic": ("{B24}==", "Authorization: Basic {}"),
    "cookie": ("{L30}", "Cookie: lang=en; sid={}; theme=dark"),
    "shadow": ("$6${L8}${L86}", "me:{}:19700:0:99999:7:::"),
    "bcrypt": ("$2b$12${L53}", "htpasswd me:{}"),
    "PuTTY": ("{B64}", "PuTTY-User-Key-File-3: ssh-ed25519\nPrivate-Lines: 1\n{}\nPrivate-MAC: 00"),
    "PEM": ("{B64}", "-----BEGIN~ OPENSSH PRIVATE KEY-----\n{}\n-----END~ OPENSSH PRIVATE KEY-----"),
    "GPG": ("{B64}", "-----BEGIN~ PGP PRIVATE KEY BLOCK-----\n\n{}\n-----END~ PGP PRIVATE KEY BLOCK-----"),
    "age": ("AGE~-SECRET-KEY-1{U58}", "# public key\n{}"),
    "WireGuard": ("{B43}=", "[Interface]\nPrivateKey = {}"),
    "kubeconfig": ("{B80}", "users:\n- name: me\n  user:\n    client-key-data: {}"),
    "Kubernetes secret": ("{B32}", "kind: Secret\ndata:\n  db: {}"),
    "docker config": ("{B32}", '{"auths": {"ghcr.io": {"auth": "{}"}}}'),
    ".pgpass": ("{L12}", "db.internal:5432:runs:me:{}"),
    ".netrc": ("{L20}", "machine api.wandb.ai login user password {}"),
    "database": ("p@{L4}/w:{L3}!", "postgresql://me:{}@db.internal:5432/runs"),
    "JDBC": ("{L12}", "jdbc:mysql://db/runs?user=me&password={}"),
    "ODBC": ("{L12}", "Driver=x;Server=db;Uid=me;Pwd={};"),
    "mysql": ("{L12}", "mysql -u root -p{} runs"),
    "SQL": ("{L12}", "ALTER USER me IDENTIFIED BY '{}'"),
    "sshpass": ("{L12}", "sshpass -p {} ssh host"),
    "HTML": ("{L12}", '<input type="password" name="pw" value="{}">'),
    "XML": ("{L12}", "<property name='dbPassword' value='{}'/>"),
    "INI": ("{L12}", "[smtp]\nuser = me\npass = {}"),
    "Python call": ("{A9}{D2}", "connect(host='db', password='{}')"),
    "PIN": ("{D4}", "PIN {}"),
    "PIN of a door": ("{D6}", "The door opens with {}"),
    "one-time code": ("{D3} {D3}", "Your code is {}"),
    "credit card": ("{D4} {D4} {D4} {D4}", "card {}"),
    "IBAN": ("DE{D2} {D4} {D4} {D4} {D4} {D2}", "IBAN: {}"),
    "phone": ("+49 {D3} {D7}", "call {}"),
    "TOTP seed": ("{U32}", "otpauth://totp/me?secret={}"),
    "mnemonic": ("{W12}", "seed phrase: {}"),
    "passphrase": ("{W4}", "passphrase {}"),
    "joined words": ("{W1}-{W1}-{D2}", "my password: {}"),
    "German": ("{A8}{D4}!", "Das Passwort lautet {}"),
    "French": ("{A8}{D4}!", "mot de passe : {}"),
    "Spanish": ("{A8}{D4}!", "contraseña: {}"),
    "Chinese": ("{A8}{D4}", "密码是{}"),
    "licence": ("{U5}-{U5}-{U5}-{U5}", "Activation: {}"),
    "symbols": ("{L3}$,{L3}!;{L3}%", "pw '{}'"),
}


@dataclass(frozen=True)
class Planted:
    kind: str
    secret: str
    text: str  # with the secret in it

    def __str__(self) -> str:
        return self.kind


def every(seed: int = 7) -> list[Planted]:
    """One secret of each kind."""
    chance = random.Random(seed)
    found = []
    for kind, (form, text) in KINDS.items():
        secret = re.sub(r"{(\w)(\d+)}", lambda slot: _fill_slot(chance, slot), form).replace("~", "")
        found.append(Planted(kind, secret, text.replace("~", "").replace("{}", secret)))
    return found


def made_up(length: int) -> str:
    return "".join(random.Random(length).choices(LETTERS, k=length))


def _fill_slot(chance: random.Random, slot: re.Match[str]) -> str:
    number = int(slot[2])
    if slot[1] == "W":
        return " ".join(chance.sample(WORDS, number))
    return "".join(chance.choices(ALPHABETS[slot[1]], k=number))


def forms_of(planted: Planted) -> list[str]:
    """Texts with the secret in it."""
    return [planted.text, *(text.replace("{}", planted.secret) for text in ANYWHERE)]


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def leaks(planted: Planted, found: str, harmless: str) -> list[str]:
    """Parts of the secret that are in a text, and not in one without it: six characters, or all of a shorter one."""
    size = min(6, len(planted.secret))
    parts = {planted.secret[at : at + size] for at in range(len(planted.secret) - size + 1)}
    return sorted(part for part in parts if part in found and part not in harmless)
