// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

var update = flag.Bool("update", false, "write testdata/frames of this version")

// golden are frames of each type as this version writes them.
func golden(t testing.TB) map[string]frame {
	t.Helper()
	payload := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	return map[string]frame{
		"hello-successor":   {kind: frameHello, payload: payload(hello{MinVersion: 1, MaxVersion: 1, Name: "app", Build: "two", PID: 4712})},
		"hello-predecessor": {kind: frameHello, payload: payload(hello{MinVersion: 1, MaxVersion: 1, Name: "app", Build: "one", PID: 4711, Generation: 7, State: true, Probation: 5000})},
		"refuse":            {kind: frameRefuse, payload: payload(refusal{"upgrading", "another upgrade is under way"})},
		"manifest": {kind: frameManifest, payload: payload(manifest{Last: true, Entries: []entry{
			{Role: roleLifeline, Generation: 7, PID: 4711, Build: "one", Cookie: 3},
			{Role: roleListener, Name: "web", Network: "tcp", Asked: ":443", Address: "[::]:443", Cookie: 1 << 40},
			{Role: rolePacket, Name: "dns", Network: "udp4", Asked: "127.0.0.1:53", Address: "127.0.0.1:53", Cookie: 5},
			{Role: roleListener, Name: "local", Network: "unix", Address: "/run/app/local", Borrowed: true, Cookie: 6},
			{Role: roleFile, Name: "log"},
		}})},
		"accepted":  {kind: frameAccepted, payload: []byte(`{"descriptors":5}`)},
		"state":     {kind: frameState, payload: []byte("\x00any octets\xff")},
		"state-end": {kind: frameStateEnd, payload: payload(stateEnd{Length: 12, CRC32C: 0xdeadbeef})},
		"ready":     {kind: frameReady}, "commit": {kind: frameCommit}, "committed": {kind: frameCommitted},
		"ping": {kind: framePing}, "pong": {kind: framePong}, "final": {kind: frameFinal},
		"final-reload": {kind: frameFinal, payload: payload(final{Reload: true})},
		"rollback":     {kind: frameRollback, payload: payload(refusal{"failed", "the successor does not answer"})},
		"request":      {kind: frameRequest, payload: payload(request{Do: "upgrade"})},
		"result":       {kind: frameResult, payload: payload(result{Error: "no", Code: "failed", Now: &Status{Peer: Peer{Name: "app", Generation: 7, PID: 4711, Build: "one"}, Phase: "active", Handed: []string{"web"}}})},
	}
}

// The frames of every released version are read for ever; those of this one are
// written octet by octet as they are checked in (G3).
func TestGoldenFrames(t *testing.T) {
	folder := filepath.Join("testdata", "frames", "1")
	all := golden(t)
	if *update {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, f := range all {
			b, err := appendFrame(nil, f)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, name), b, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, want := range all {
		b, err := os.ReadFile(filepath.Join(folder, name))
		if err != nil {
			t.Fatalf("%v; go test -update writes it", err)
		}
		got, err := parseFrame(b)
		if err != nil || got.kind != want.kind || !bytes.Equal(got.payload, want.payload) {
			t.Errorf("%s: read %v %q, %v", name, got.kind, got.payload, err)
		}
		if wrote, err := appendFrame(nil, want); err != nil || !bytes.Equal(wrote, b) {
			t.Errorf("%s: wrote %q, %v; want %q", name, wrote, err, b)
		}
	}
	files, err := os.ReadDir(folder)
	if err != nil || len(files) != len(all) {
		t.Errorf("%d files, %v; want %d", len(files), err, len(all))
	}
}

func TestParseFrame(t *testing.T) {
	for name, b := range map[string][]byte{
		"empty":      {},
		"short":      {0, 0, 0, 0, 0, 1, 0},
		"too long":   {0, 0, 0, 9, 0, 1, 0, 0, 'x'},
		"too short":  {0, 0, 0, 0, 0, 1, 0, 0, 'x'},
		"huge":       {0xff, 0xff, 0xff, 0xff, 0, 1, 0, 0},
		"understand": {0, 0, 0, 0, 0x7f, 0, 0, flagMustUnderstand},
	} {
		if _, err := parseFrame(b); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if f, err := parseFrame([]byte{0, 0, 0, 0, 0x7f, 0, 0, 0}); err != nil || f.kind != 0x7f00 {
		t.Errorf("unknown: %v, %v", f, err)
	}
	if _, err := appendFrame(nil, frame{payload: make([]byte, maxPayload+1)}); err == nil {
		t.Error("a frame that is too long was written")
	}
}

// raw is a peer of the control socket that writes what it likes.
func rawPeer(t testing.TB, socket string) *peer {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPeer(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	_ = c.SetDeadline(time.Now().Add(patience))
	return p
}

// A successor of another version of the protocol works, or is refused with both
// versions named; what is not known is skipped (G3).
func TestVersions(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	for _, tc := range []struct {
		hello string
		want  string // in the refusal, empty when it goes on
	}{
		{`{"min_version":2,"max_version":3,"name":"x","build":"next","pid":1}`, "speaks versions 2 to 3"},
		{`{"min_version":0,"max_version":0,"name":"x","build":"old","pid":1}`, "speaks versions 0 to 0"},
		{`{"min_version":1,"max_version":2,"name":"x","build":"next","pid":1,"later":{"a":[1]}}`, ""},
		{`{"min_version":0,"max_version":1,"name":"x","build":"old"}`, ""},
		{`{"min_version":"one"}`, "read HELLO"},
		{`not JSON`, "read HELLO"},
	} {
		testutil.WaitFor(t, patience, func() bool { return !first.Status().Upgrading }, "the end of the last one")
		p := rawPeer(t, socket)
		if err := p.sendRaw(frame{kind: 0x7e00, payload: []byte("skip me")}); err != nil {
			t.Fatal(err)
		}
		if err := p.sendRaw(frame{kind: frameHello, payload: []byte(tc.hello)}); err != nil {
			t.Fatal(err)
		}
		theirs, err := wantJSON[hello](p, frameHello)
		if tc.want == "" {
			if err != nil || theirs.MinVersion != 1 || theirs.MaxVersion != 1 || theirs.Generation != 1 {
				t.Errorf("%s: %+v, %v", tc.hello, theirs, err)
			}
		} else if err == nil || !errors.Is(err, ErrProtocol) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v", tc.hello, err)
		}
		p.close()
	}
	if got := ask(t, first.l.Addr()); got != "1" {
		t.Errorf("generation %s answers", got)
	}
	settledUpgrade(t, first)
	mustStart(t, testOptions(t, socket), nil)
}

func settledUpgrade(t testing.TB, g *generation) {
	t.Helper()
	testutil.WaitFor(t, patience, func() bool { return !g.Status().Upgrading }, "the end of the upgrade")
}

// Peers that connect and are silent, speak nonsense or pass descriptors keep
// nobody out and leave no descriptor here.
func TestHostilePeers(t *testing.T) {
	socket := socketPath(t)
	first := mustStart(t, testOptions(t, socket), nil)
	before := openFiles(t)
	var peers []*peer
	for range 100 {
		peers = append(peers, rawPeer(t, socket))
	}
	if _, err := RequestStatus(timeout(t, patience), socket); err != nil {
		t.Errorf("behind silent peers: %v", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for i, p := range peers {
		var fds []int
		if fd, err := duplicate(null); err == nil {
			fds = []int{fd, fd, fd}
		}
		switch i % 5 {
		case 0:
			_, _ = p.conn.Write([]byte("nonsense"))
		case 1:
			_, _ = p.conn.Write(make([]byte, maxPayload+100))
		case 2:
			_ = p.sendRaw(frame{kind: frameRequest, payload: []byte(`{"do":"status"}`), fds: fds})
		case 3:
			_ = p.sendRaw(frame{kind: frameManifest, payload: []byte(`{"entries":[{},{},{}]}`), fds: fds})
		case 4:
			_ = p.sendRaw(frame{kind: frameRequest, payload: []byte(`{"do":"format the disk"}`)})
		}
		closeAll(fds[:min(1, len(fds))])
		p.close()
	}
	if _, err := RequestStatus(timeout(t, patience), socket); err != nil {
		t.Errorf("after hostile peers: %v", err)
	}
	testutil.WaitFor(t, patience, func() bool { return openFiles(t) <= before+1 }, "%d open files, as before", before)
	if got := ask(t, first.l.Addr()); got != "1" {
		t.Errorf("generation %s answers", got)
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

func FuzzParseFrame(f *testing.F) {
	for _, g := range golden(f) {
		b, err := appendFrame(nil, g)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseFrame(b)
		if err != nil {
			return
		}
		again, err := appendFrame(nil, got)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("%q became %q, %v", b, again, err)
		}
		_, _ = decode[hello](got)
		_, _ = decode[stateEnd](got)
		_, _ = decode[final](got)
		_, _ = decode[request](got)
		_, _ = decode[result](got)
		_, _ = decode[refusal](got)
	})
}

// FuzzManifest gives a manifest of any content with real descriptors: whatever it
// says, it is taken as it is or refused, and no descriptor is left behind.
func FuzzManifest(f *testing.F) {
	f.Add(golden(f)["manifest"].payload, uint8(5))
	f.Add([]byte(`{"entries":[{"role":"file","name":"a"}],"last":true}`), uint8(1))
	f.Add([]byte(`{"entries":[{"role":"listener","name":"a","cookie":1}]}`), uint8(1))
	f.Fuzz(func(t *testing.T, payload []byte, n uint8) {
		before := openFiles(t)
		fds := make([]int, n%8)
		for i := range fds {
			var err error
			if i%2 == 0 {
				fds[i], err = unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			} else {
				fds[i], err = unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		h := &Handover{}
		_, err := h.accept(frame{kind: frameManifest, payload: payload, fds: fds})
		if err == nil && len(h.inherited) != len(fds) {
			t.Errorf("%d of %d descriptors were taken", len(h.inherited), len(fds))
		}
		for _, i := range h.inherited {
			closeAll([]int{i.fd})
		}
		if after := openFiles(t); after != before {
			t.Errorf("%d open files, before %d", after, before)
		}
	})
}
