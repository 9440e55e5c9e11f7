//go:build cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"larder/transfer"
)

func TestHandles(t *testing.T) {
	words, numbers := table[string]{kind: "word"}, table[int]{kind: "number"}
	h, err := words.add("one")
	require.NoError(t, err)
	other, err := numbers.add(1)
	require.NoError(t, err)
	require.NotEqual(t, h, other)

	got, err := words.of(h)
	require.NoError(t, err)
	require.Equal(t, "one", got)

	_, err = words.of(other) // another kind's
	require.EqualError(t, err, fmt.Sprintf("the word is closed (handle %d)", other))
	require.Equal(t, codeClosed, codeOf(err))

	_, err = words.take(h)
	require.NoError(t, err)
	_, err = words.take(h) // twice
	require.Equal(t, codeClosed, codeOf(err))
	_, err = words.of(0)
	require.Equal(t, codeClosed, codeOf(err))

	next, err := words.add("two")
	require.NoError(t, err)
	require.Greater(t, next, other, "handles are not used again")
}

func TestHandlesAreBounded(t *testing.T) {
	var leak table[int]
	for range maxObjects {
		_, err := leak.add(0)
		require.NoError(t, err)
	}
	_, err := leak.add(0)
	require.Equal(t, codeInvalid, codeOf(err))
	require.ErrorContains(t, err, "close some")
}

func TestCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want code
	}{
		{nil, codeOK},
		{errAgain, codeAgain},
		{invalid("%d bytes", 3), codeInvalid},
		{fmt.Errorf("open: %w", &handleError{"engine", 7}), codeClosed},
		{transfer.ErrStale, codeStale},
		{fmt.Errorf("request 3: %w", transfer.ErrReadOnly), codeReadOnly},
		{errors.Join(transfer.ErrUnsettled, transfer.ErrTimeout), codeUnsettled},
		{errors.Join(transfer.ErrTimeout, transfer.ErrNoPath), codeTimeout},
		{fmt.Errorf("retire: %w", context.DeadlineExceeded), codeTimeout},
		{errors.New("anything else"), codeFailed},
	} {
		require.Equal(t, c.want, codeOf(c.err), "%v", c.err)
	}
}

func TestPanicsAreErrors(t *testing.T) {
	var nothing map[string]int
	err := protect(func() error { nothing["x"] = 1; return nil })
	require.Equal(t, codeInternal, codeOf(err))
	require.ErrorContains(t, err, "assignment to entry in nil map")
	require.ErrorContains(t, err, "native_test.go", "it says where")
	require.NoError(t, protect(func() error { return nil }))
}

func TestTextsAreCutBetweenCharacters(t *testing.T) {
	require.Equal(t, "abc", clip("abc", 3))
	require.Equal(t, "ab", clip("abc", 2))
	require.Equal(t, "aé", clip("aéé", 4))
	require.Empty(t, clip(strings.Repeat("é", 3), 1))
}

func TestJobs(t *testing.T) {
	release := make(chan struct{})
	h, err := begin(0, nil, func(context.Context) (uint64, error) {
		<-release
		return 42, nil
	})
	require.NoError(t, err)
	j, err := jobs.of(h)
	require.NoError(t, err)
	require.ErrorIs(t, await(j.done, 0), errAgain)
	require.ErrorIs(t, await(j.done, time.Millisecond), errAgain)
	close(release)
	require.NoError(t, await(j.done, time.Second))
	require.EqualValues(t, 42, j.handle)
	jobs.drop(h)
}

func TestAJobEndsWithItsTime(t *testing.T) {
	h, err := begin(time.Millisecond, nil, func(ctx context.Context) (uint64, error) {
		<-ctx.Done()
		return 0, ctx.Err()
	})
	require.NoError(t, err)
	j, err := jobs.take(h)
	require.NoError(t, err)
	<-j.done
	require.Equal(t, codeTimeout, codeOf(j.err))
}

func TestWhatAnAbandonedJobMakesGoesAway(t *testing.T) {
	undone := make(chan uint64)
	h, err := begin(0, func(h uint64) { undone <- h }, func(ctx context.Context) (uint64, error) {
		<-ctx.Done()
		return 7, nil // it had just made it
	})
	require.NoError(t, err)
	require.NoError(t, abandon(h))
	require.EqualValues(t, 7, <-undone)
	require.Equal(t, codeClosed, codeOf(abandon(h)))
}
