// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"instar/bpf"
	"instar/dispatch/connid"
)

// labelKeys is the HKDF label of the data plane's keys.
const labelKeys = "instar connection id keys v1"

// deriveKeys fills the data plane's keys from the master secret.
func deriveKeys(s *bpf.Secrets) error {
	b, err := hkdf.Key(sha256.New, s.Master[:], nil, labelKeys, connid.KeysLen)
	if err != nil {
		return fmt.Errorf("derive connection ID keys: %w", err)
	}
	le := binary.LittleEndian
	s.Cid = [2]uint64{le.Uint64(b), le.Uint64(b[8:])}
	s.MulHandle = le.Uint64(b[16:])
	s.MulGeneration = le.Uint64(b[24:])
	s.Affinity = [2]uint64{le.Uint64(b[32:]), le.Uint64(b[40:])}
	return nil
}

// Secret derives n bytes (1 to 8,160) from the group's master secret by
// HKDF-SHA-256 (RFC 5869) with the label as info. Every generation of the group
// gets the same bytes for the same label, also after a restart from nothing:
// stateless reset keys, token keys, session ticket keys.
func (g *Group) Secret(label string, n int) ([]byte, error) {
	if n < 1 || n > 255*sha256.Size {
		return nil, fmt.Errorf("derive secret %q: %w: length %d, want 1 to %d", label, ErrOptions, n, 255*sha256.Size)
	}
	b, err := hkdf.Key(sha256.New, g.secrets.Master[:], nil, "instar secret "+label, n)
	if err != nil {
		return nil, fmt.Errorf("derive secret %q: %w", label, err)
	}
	return b, nil
}

// newCodec is the group's connection-ID codec.
func newCodec(s *bpf.Secrets, lb *connid.LoadBalancer) (*connid.Codec, error) {
	b := make([]byte, 0, connid.KeysLen)
	for _, w := range []uint64{s.Cid[0], s.Cid[1], s.MulHandle, s.MulGeneration, s.Affinity[0], s.Affinity[1]} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	keys, err := connid.KeysFromBytes(b)
	if err != nil {
		return nil, err
	}
	return connid.New(keys, lb)
}
