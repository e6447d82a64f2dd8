// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"encoding/base64"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.zx2c4.com/wireguard/device"
)

// key is a key of 32 equal octets, in the form of the configuration.
func key(octet byte) string {
	b := make([]byte, 32)
	for i := range b {
		b[i] = octet
	}
	return base64.StdEncoding.EncodeToString(b)
}

func TestParseConfig(t *testing.T) {
	c, err := ParseConfig(strings.NewReader(`
# of the gateway
[Interface]
PrivateKey = ` + key(1) + ` # secret
ListenPort=51000
address = 10.0.0.1/24, fd00::1/64
Address = 10.0.1.1
MTU = 1400

[Peer]
PublicKey = ` + key(2) + `
PresharedKey = ` + key(3) + `
AllowedIPs = 10.0.0.2/24, fd00::2
AllowedIPs = 192.0.2.0/24
Endpoint = [2001:db8::1]:51820
PersistentKeepalive = 25
[peer]
PublicKey = ` + key(4) + `
PersistentKeepalive = off
`))
	if err != nil {
		t.Fatal(err)
	}
	want := `private_key=` + strings.Repeat("01", 32) + `
public_key=` + strings.Repeat("02", 32) + `
preshared_key=` + strings.Repeat("03", 32) + `
persistent_keepalive_interval=25
endpoint=[2001:db8::1]:51820
allowed_ip=10.0.0.0/24
allowed_ip=fd00::2/128
allowed_ip=192.0.2.0/24
public_key=` + strings.Repeat("04", 32) + `
preshared_key=` + strings.Repeat("00", 32) + `
persistent_keepalive_interval=0
`
	if diff := cmp.Diff(want, c.uapi(nil)); diff != "" {
		t.Error(diff)
	}
	known := map[device.NoisePublicKey]netip.AddrPort{c.Peers[0].PublicKey: netip.MustParseAddrPort("192.0.2.1:5")}
	if text := c.uapi(known); !strings.Contains(text, "endpoint=192.0.2.1:5\n") || strings.Contains(text, "2001") {
		t.Error(text)
	}
	if c.ListenPort != 51000 || c.MTU != 1400 || len(c.Addresses) != 3 || c.Addresses[0].String() != "10.0.0.1/24" || c.Addresses[2].String() != "10.0.1.1/32" {
		t.Errorf("%+v", c)
	}
	c, err = ParseConfig(strings.NewReader("[Interface]\nPrivateKey=" + key(1)))
	if err != nil || c.ListenPort != 51820 || c.MTU != 1420 {
		t.Errorf("defaults: %+v, %v", c, err)
	}
}

func TestParseConfigErrors(t *testing.T) {
	device := "[Interface]\nPrivateKey=" + key(1) + "\n"
	for _, tc := range []struct{ text, want string }{
		{"", "no PrivateKey"},
		{"PrivateKey=" + key(1), "line 1: privatekey: it is in no section"},
		{"[Interface]\nPrivateKey=secret", "line 2: privatekey: no base64 of 32 bytes"},
		{"[Interface]\nPrivateKey=" + key(1)[:40], "no base64"},
		{"[Other]", "neither"},
		{device + "nonsense", "line 3: no \"=\""},
		{device + "DNS=1.1.1.1", "line 3: dns: unknown in [Interface]"},
		{device + "ListenPort=0", "not in 1 to 65535"},
		{device + "ListenPort=65536", "not in 1 to 65535"},
		{device + "MTU=100", "100 is not in 576"},
		{device + "MTU=1400\nMTU=1400", "line 4: mtu is there twice"},
		{device + "Address=10.0.0.1/33", "line 3: address"},
		{device + "Address=fe80::1%eth0", "line 3: address"},
		{device + "[Peer]", "no PublicKey"},
		{device + "[Peer]\nPublicKey=" + key(2) + "\n[Peer]\nPublicKey=" + key(2), "two peers have the public key " + key(2)},
		{device + "[Peer]\nEndpoint=host:1", "line 4: endpoint"},
		{device + "[Peer]\nName=x", "unknown in [Peer]"},
		{device + "[Peer]\nPersistentKeepalive=x", "not in 0 to 65535"},
	} {
		_, err := ParseConfig(strings.NewReader(tc.text))
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %v, want %q", tc.text, err, tc.want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the error shows a key: %v", err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add("[Interface]\nPrivateKey = " + key(1) + "\nAddress = 10.0.0.1/24\n[Peer]\nPublicKey = " + key(2) + "\nAllowedIPs = 0.0.0.0/0\n")
	f.Add("[Peer]\nEndpoint = [::1]:1 # x\n")
	f.Fuzz(func(t *testing.T, text string) {
		c, err := ParseConfig(strings.NewReader(text))
		if err != nil {
			return
		}
		// One value is one line for the device.
		for line := range strings.Lines(c.uapi(nil)) {
			if strings.Count(line, "=") < 1 || strings.TrimSpace(line) == "" {
				t.Errorf("line %q", line)
			}
		}
	})
}

// What a process writes of its peers is what the next one reads.
func TestState(t *testing.T) {
	text := "private_key=" + strings.Repeat("01", 32) + "\nlisten_port=1\n" +
		"public_key=" + strings.Repeat("02", 32) + "\npreshared_key=00\nprotocol_version=1\nendpoint=192.0.2.1:5\n" +
		"last_handshake_time_sec=1700000000\nlast_handshake_time_nsec=5\ntx_bytes=1\nrx_bytes=1\nallowed_ip=10.0.0.0/8\n" +
		"public_key=" + strings.Repeat("03", 32) + "\nlast_handshake_time_sec=0\nlast_handshake_time_nsec=0\n" +
		"public_key=" + strings.Repeat("04", 32) + "\nendpoint=[fd00::1]:6\nlast_handshake_time_sec=0\nlast_handshake_time_nsec=0\n"
	peers, err := parseStatus(text)
	if err != nil || len(peers) != 3 {
		t.Fatalf("%+v, %v", peers, err)
	}
	var b strings.Builder
	if err := writeState(&b, peers, 7); err != nil {
		t.Fatal(err)
	}
	got, number, err := readState(strings.NewReader(b.String()))
	if err != nil || number != 7 || len(got) != 2 {
		t.Fatalf("%+v, %d, %v", got, number, err)
	}
	at := time.Unix(1700000000, 5)
	if got[0].key != peers[0].key || got[0].endpoint.String() != "192.0.2.1:5" || !got[0].handshake.Equal(at) {
		t.Errorf("%+v", got[0])
	}
	if got[1].key != peers[2].key || got[1].endpoint.String() != "[fd00::1]:6" || !got[1].handshake.IsZero() {
		t.Errorf("%+v", got[1])
	}
	if !got[0].recent(at.Add(179*time.Second)) || got[0].recent(at.Add(181*time.Second)) || got[1].recent(at) {
		t.Error("recent")
	}
	for _, bad := range []string{"", "{", `{"peers":[{"public_key":"02"}]}`, `{"peers":[{"public_key":"` + strings.Repeat("02", 32) + `","endpoint":"192.0.2.1:5","timestamp":"AAAAAAAAAAAAAAAAAAAAAAAA"}]}`, `{"peers":[{"public_key":"` + strings.Repeat("02", 32) + `"}]}`} {
		if _, _, err := readState(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
	for _, bad := range []string{"public_key=1", text + "endpoint=x", text + "last_handshake_time_sec=x", text + "last_handshake_time_nsec=x"} {
		if _, err := parseStatus(bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func FuzzReadState(f *testing.F) {
	f.Add(`{"number":1,"peers":[{"public_key":"` + strings.Repeat("02", 32) + `","endpoint":"192.0.2.1:5","handshake":"2026-01-01T00:00:00Z"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		peers, _, err := readState(strings.NewReader(text))
		for _, p := range peers {
			if err != nil || !p.endpoint.IsValid() {
				t.Errorf("%+v, %v", p, err)
			}
		}
	})
}
