// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/kernel"
	"instar/internal/testutil"
)

// pair are the two ends of a connection.
func pair(t testing.TB) (a, b *peer) {
	t.Helper()
	ours, file, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := net.FileConn(file)
	if err = errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	ends := make([]*peer, 2)
	for i, c := range []*net.UnixConn{ours, theirs.(*net.UnixConn)} {
		if ends[i], err = newPeer(c); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(ends[i].close)
	}
	return ends[0], ends[1]
}

// Who sends on a connection that the other process has closed learns why, and takes
// no frame away from who receives: not those before the refusal, with their
// descriptors, and not the refusal.
func TestRefusalIsFound(t *testing.T) {
	before := openFiles(t)
	a, b := pair(t)
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(
		b.send(framePing, nil),
		b.send(frameManifest, manifest{}, null),
		b.send(frameRollback, refusal{"failed", "not good enough"}),
		unix.Close(null))
	if err != nil {
		t.Fatal(err)
	}
	b.close()
	for range 2 {
		if err := a.send(framePong, nil); !errors.Is(err, ErrRolledBack) {
			t.Errorf("send: %v", err)
		}
	}
	for _, want := range []frameType{framePing, frameManifest} {
		f, err := a.receive()
		if err != nil || f.kind != want || len(f.fds) != map[frameType]int{frameManifest: 1}[want] {
			t.Errorf("received %v with descriptors %v, %v; want %v", f.kind, f.fds, err, want)
		}
		closeAll(f.fds)
	}
	if _, err := a.want(frameFinal); !errors.Is(err, ErrRolledBack) {
		t.Errorf("after the frames: %v", err)
	}
	if err := a.send(framePong, nil); !errors.Is(err, errPeerGone) {
		t.Errorf("send after the refusal was read: %v", err)
	}
	if _, err := a.receive(); !errors.Is(err, errPeerGone) {
		t.Errorf("at the end: %v", err)
	}
	a.close()

	// What nobody reads is closed.
	c, d := pair(t)
	if err := d.send(frameManifest, manifest{}, 0); err != nil {
		t.Fatal(err)
	}
	d.close()
	if err := c.send(framePong, nil); !errors.Is(err, errPeerGone) {
		t.Errorf("send without a refusal: %v", err)
	}
	c.close()
	if after := openFiles(t); after != before {
		t.Errorf("%d open files, before %d", after, before)
	}
}

// A goroutine that receives gets every frame whole and in order while another one
// sends, also on a connection that is closed meanwhile.
func TestSendWhileReceiving(t *testing.T) {
	testutil.Since(t, kernel.Version{Major: 6, Minor: 1}, "to send to a closed SOCK_SEQPACKET socket throws away what it had written")
	const frames = 50
	for range 50 {
		a, b := pair(t)
		var all sync.WaitGroup
		all.Go(func() {
			for i := range frames {
				if err := b.sendRaw(frame{kind: frameState, payload: bytes.Repeat([]byte{byte(i)}, 1000)}); err != nil {
					t.Error(err)
				}
			}
			b.refuse(errors.New("the end"))
			b.close()
		})
		for range 2 {
			all.Go(func() {
				for a.sendRaw(frame{kind: frameState, payload: bytes.Repeat([]byte{0xff}, 100)}) == nil {
				}
			})
		}
		for i := range frames {
			f, err := a.receive()
			if err != nil || f.kind != frameState || !bytes.Equal(f.payload, bytes.Repeat([]byte{byte(i)}, 1000)) {
				t.Fatalf("frame %d is %v %.20q..., %v", i, f.kind, f.payload, err)
			}
		}
		if _, err := a.want(frameFinal); !errors.As(err, new(*RefusedError)) {
			t.Errorf("at the end: %v", err)
		}
		all.Wait()
		a.close()
	}
}

// A context that ends does not cut off the last word.
func TestLastWord(t *testing.T) {
	a, b := pair(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer a.limit(ctx, forever)()
	a.part(frameRefuse, refusal{"failed", "one"})
	if err := a.conn.SetWriteDeadline(time.Time{}); err != nil { // not a matter of a second here
		t.Fatal(err)
	}
	cancel()
	if _, err := a.receive(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("receive: %v", err)
	}
	if err := a.send(frameRefuse, refusal{"failed", "two"}); err != nil {
		t.Errorf("send: %v", err)
	}
	for _, want := range []string{"one", "two"} {
		if _, err := b.want(frameFinal); err == nil || err.Error() != want {
			t.Errorf("received %v, want %s", err, want)
		}
	}
}

// Whoever closes the connection first closes the pidfd, and nobody asks another
// descriptor of that number whether the predecessor is dead.
func TestDeadWhileClosing(t *testing.T) {
	for range 20 {
		a, _ := pair(t)
		child := exec.CommandContext(t.Context(), "sleep", "100")
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		a.cred.Pid = int32(child.Process.Pid)
		a.watch()
		if a.pidfd < 0 {
			t.Fatal("not watched")
		}
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = child.Wait() // killed
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if !a.dead(errPeerGone) {
					t.Error("a dead process is said to live")
				}
			})
			all.Go(a.close)
		}
		all.Wait()
	}
}
