"""Accounting: slurmdbd on a private MariaDB."""

from . import network
from .machine import greets
from .processes import run


def start_accounting(lab):
    """slurmdbd on a private MariaDB that listens on a Unix socket only."""
    d, st = lab.dir, lab.state
    data, sock = d / "mysql", d / "my.sock"
    run(
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={data}",
        "--user=root",
        "--skip-test-db",
        "--auth-root-authentication-method=normal",
        "--skip-name-resolve",
        timeout=120,
    )
    lab.spawn(
        "mariadbd",
        [
            "mariadbd",
            "--no-defaults",
            "--user=root",
            f"--datadir={data}",
            f"--socket={sock}",
            "--skip-networking",
            f"--pid-file={d}/pid/mariadbd.pid",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=16M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-lock-wait-timeout=900",
            "--skip-log-bin",
            "--performance-schema=OFF",
        ],
    )
    lab.wait_for_daemon("mariadbd", 60, lambda: greets(sock))
    conf = d / "etc" / "slurmdbd.conf"
    conf.write_text(
        f"AuthType=auth/munge\nAuthInfo=socket={d}/munge/s\nDbdHost={st['head']}\nDbdAddr={st['head_addr']}\n"
        f"DbdPort={st['dbd_port']}\nSlurmUser=root\nDebugLevel={lab.opt['debug']}\n"
        f"LogFile={d}/log/slurmdbd.log\nPidFile={d}/pid/slurmdbd.pid\nStorageType=accounting_storage/mysql\n"
        f"StorageHost=localhost\nStorageUser=root\nStorageLoc=slurmlab\n"
    )
    conf.chmod(0o600)
    # libmariadb takes the socket from MYSQL_UNIX_PORT; slurmdbd finds its file next to SLURM_CONF
    lab.spawn("slurmdbd", network.on_head(lab, ["slurmdbd", "-D"]), env={"MYSQL_UNIX_PORT": str(sock)})
    lab.wait_for_daemon(
        "slurmdbd", 60, lambda: lab.client("sacctmgr", "-n", "list", "cluster", check=False, timeout=60).returncode == 0
    )
    lab.client("sacctmgr", "-i", "add", "cluster", "slurmlab", check=False)
