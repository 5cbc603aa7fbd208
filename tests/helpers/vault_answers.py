"""Answers of a Vault server by its documentation and source, each with the reason that fastrack has to give."""

_DENIED = "1 error occurred:\n\t* permission denied\n\n"
_INVALID = "2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n"

DOCUMENTED = [
    # https://developer.hashicorp.com/vault/api-docs#http-status-codes; 472 and 473 as in /sys/health
    (307, [], "is a standby, or names another. Name the active one, or a load balancer, in VAULT_ADDR"),
    (404, ["no handler for route"], "no such mount or key"),
    (412, [], "does not know the token or the key yet; try again"),
    (472, [], "is a standby"),
    (473, [], "is a standby"),
    (502, [], "did not reach the active server; try again"),
    (504, [], "did not reach the active server; try again"),
    (501, [], "look into the log of the server"),
    (503, ["Vault is sealed"], "is sealed; have it unsealed"),
    # https://developer.hashicorp.com/vault/docs/concepts/adaptive-overload-protection
    (
        503,
        ["1 error occurred:\n\t* Vault server temporarily overloaded\n\n"],
        "maintenance or overloaded; try again later",
    ),
    # https://developer.hashicorp.com/vault/docs/concepts/resource-quotas
    (
        429,
        ['request path "transit/decrypt/owner": rate limit quota exceeded'],
        "limits the rate of requests; try again",
    ),
    # https://developer.hashicorp.com/vault/docs/concepts/tokens#error-responses
    (403, [_INVALID], "wrong, has expired or was revoked"),
    (403, [_DENIED], "lacks the right to update this path"),
    # sdk/helper/keysutil/policy.go of hashicorp/vault: ErrTooOld, and the errors of decryption
    (400, ["ciphertext or signature version is disallowed by policy (too old)"], "lower its min_decryption_version"),
    (400, ["invalid ciphertext: version is too new"], "a later version of the key"),
    (400, ["cipher: message authentication failed"], "did not encrypt this ciphertext"),
    (500, ["1 error occurred:\n\t* cipher: message authentication failed\n\n"], "did not encrypt this ciphertext"),
    (400, ["encryption key not found"], "the key is missing, or did not encrypt this ciphertext"),
    # https://github.com/hashicorp/vault/blob/main/sdk/helper/consts/error.go
    (500, ["local node not active but active cluster node not found"], "have no active one"),
]
"""The status, the errors and the reason."""
