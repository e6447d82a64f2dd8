// SPDX-License-Identifier: Apache-2.0

package connid

import (
	"bytes"
	"encoding/json"
	"os"
	"strconv"
	"testing"
)

func readVectors(t *testing.T, path string, into any) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// codecVectors is testdata/codec.json, which was computed apart from this
// package.
type codecVectors struct {
	About string `json:"about"`
	Seal  []struct {
		Name         string `json:"name"`
		Keys         string `json:"keys"`
		Prefix       string `json:"prefix"`
		Handle       Handle `json:"handle"`
		Generation   uint32 `json:"generation"`
		CID          string `json:"cid"`
		LoadBalancer *struct {
			ConfigRotation uint8  `json:"config_rotation"`
			ServerID       string `json:"server_id"`
			Nonce          string `json:"nonce"`
			Key            string `json:"key"`
		} `json:"load_balancer"`
	} `json:"seal"`
	Reject []struct {
		Name       string `json:"name"`
		Keys       string `json:"keys"`
		PrefixLen  int    `json:"prefix_len"`
		Generation uint32 `json:"generation"`
		CID        string `json:"cid"`
	} `json:"reject"`
	Affinity []struct {
		Keys string `json:"keys"`
		DCID string `json:"dcid"`
		Hash string `json:"hash"`
	} `json:"affinity"`
}

func readCodecVectors(t *testing.T) codecVectors {
	t.Helper()
	var v codecVectors
	readVectors(t, "testdata/codec.json", &v)
	if len(v.Seal) < 30 || len(v.Reject) < 150 || len(v.Affinity) < 15 {
		t.Fatalf("testdata/codec.json has %d, %d and %d vectors: some are missing", len(v.Seal), len(v.Reject), len(v.Affinity))
	}
	return v
}

func vectorKeys(t *testing.T, s string) Keys {
	t.Helper()
	keys, err := KeysFromBytes(unhex(t, s))
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

func TestSealVectors(t *testing.T) {
	for _, v := range readCodecVectors(t).Seal {
		t.Run(v.Name, func(t *testing.T) {
			prefix, want := unhex(t, v.Prefix), unhex(t, v.CID)
			c := codecOfPrefixLen(t, vectorKeys(t, v.Keys), len(prefix))
			got, err := c.Seal(prefix, v.Handle, v.Generation)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("sealed %x, want %x", got, want)
			}
			asked := []Handle{}
			h, ok := c.Open(want, func(h Handle) uint32 {
				asked = append(asked, h)
				return v.Generation
			})
			if !ok || h != v.Handle {
				t.Errorf("opened as %v, %v, want %v", h, ok, v.Handle)
			}
			if len(asked) != 1 || asked[0] != v.Handle {
				t.Errorf("asked for the generations of %v, want that of %v only", asked, v.Handle)
			}

			if v.LoadBalancer == nil {
				return
			}
			lb := LoadBalancer{
				ConfigRotation: v.LoadBalancer.ConfigRotation,
				ServerID:       unhex(t, v.LoadBalancer.ServerID),
				NonceLen:       len(v.LoadBalancer.Nonce) / 2,
			}
			if v.LoadBalancer.Key != "" {
				lb.Key = unhex(t, v.LoadBalancer.Key)
			}
			if id, err := lb.DecodeServerID(want); err != nil || !bytes.Equal(id, lb.ServerID) {
				t.Errorf("load balancer decodes server ID %x, %v, want %x", id, err, lb.ServerID)
			}
		})
	}
}

func TestRejectVectors(t *testing.T) {
	for _, v := range readCodecVectors(t).Reject {
		t.Run(v.Name, func(t *testing.T) {
			c := codecOfPrefixLen(t, vectorKeys(t, v.Keys), v.PrefixLen)
			if h, ok := c.Open(unhex(t, v.CID), always(v.Generation)); ok {
				t.Errorf("%s opened as %v", v.CID, h)
			}
		})
	}
}

func TestAffinityVectors(t *testing.T) {
	for _, v := range readCodecVectors(t).Affinity {
		want, err := strconv.ParseUint(v.Hash, 16, 64)
		if err != nil {
			t.Fatal(err)
		}
		if got := vectorKeys(t, v.Keys).AffinityHash(unhex(t, v.DCID)); got != want {
			t.Errorf("hash of %q is %016x, want %016x", v.DCID, got, want)
		}
	}
}

// TestDraftVectors checks the QUIC-LB cipher with the vectors of the draft.
func TestDraftVectors(t *testing.T) {
	var file struct {
		Source  string `json:"source"`
		Errata  string `json:"errata"`
		Vectors []struct {
			Name           string `json:"name"`
			ConfigRotation uint8  `json:"config_rotation"`
			ServerID       string `json:"server_id"`
			Nonce          string `json:"nonce"`
			Key            string `json:"key"`
			CID            string `json:"cid"`
		} `json:"vectors"`
	}
	readVectors(t, "testdata/quic-lb.json", &file)
	if len(file.Vectors) != 6 {
		t.Fatalf("testdata/quic-lb.json has %d vectors, want 6", len(file.Vectors))
	}
	for _, v := range file.Vectors {
		t.Run(v.Name, func(t *testing.T) {
			lb := LoadBalancer{ConfigRotation: v.ConfigRotation, ServerID: unhex(t, v.ServerID), NonceLen: len(v.Nonce) / 2}
			want := unhex(t, v.CID)
			body := append(unhex(t, v.ServerID), unhex(t, v.Nonce)...)
			if v.Key != "" {
				lb.Key = unhex(t, v.Key)
				c, err := newLBCipher(lb.Key, draftPasses)
				if err != nil {
					t.Fatal(err)
				}
				plain := bytes.Clone(body)
				c.encrypt(body)
				back := bytes.Clone(body)
				if c.decrypt(back); !bytes.Equal(back, plain) {
					t.Errorf("decrypts to %x, want %x", back, plain)
				}
			}
			first := v.ConfigRotation<<rotationShift | byte(len(body))
			if got := append([]byte{first}, body...); !bytes.Equal(got, want) {
				t.Errorf("encodes to %x, want %x", got, want)
			}
			id, err := lb.DecodeServerID(want)
			if err != nil || !bytes.Equal(id, lb.ServerID) {
				t.Errorf("decodes to server ID %x, %v, want %x", id, err, lb.ServerID)
			}
		})
	}
}
